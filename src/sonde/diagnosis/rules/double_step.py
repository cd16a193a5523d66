"""An optimizer that steps twice with the same gradients."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.ownership import held, need_optimizers
from sonde.diagnosis.rule import Rule, above, below, fact
from sonde.diagnosis.track import Track
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find steps that no backward pass came before, taken with the gradients of the step before, time and again."""
    sizes = {optimizer.name: len(set(held(optimizer))) for optimizer in need_optimizers(case)}
    tracks = case.vitals(vitals.BACKWARDS_SEEN)
    if not tracks:
        raise NotMeasured("optimizer:vital.backwards_seen")
    for track in tracks:
        recent = track.last(int(thresholds.DOUBLE_STEPS.value))
        again = recent.numbers() == 0
        # All zero means that backward passes are not seen here at all, as with some compiled loops.
        if len(recent) < thresholds.DOUBLE_STEPS.value or not 0.4 < again.mean() < 1:
            continue
        if _has_gradients(case, recent, again, sizes.get(track.name, 0)):
            return _finding(case, track, float(again.mean()))
    return None


def _has_gradients(case: Case, recent: Track, again: NDArray[np.bool_], size: int) -> bool:
    """Say whether there was something to step with: a step after clearing does nothing."""
    missing = case.vital(recent.name, vitals.NO_GRADIENT)
    if missing is None:
        return False
    bare = dict(zip(missing.steps.tolist(), missing.numbers().tolist(), strict=True))
    return all(bare.get(step, size) < size for step in recent.steps[again].tolist())


def _finding(case: Case, track: Track, share: float) -> Finding:
    empty = track.numbers() == 0
    return RULE.finding(
        case,
        "warning",
        0.96,
        sites=(track.name,),
        step=int(track.steps[empty][0]),
        evidence=(
            above("share of the last steps that no backward pass came before", share, 0.4, f"{track.key} mean"),
            below("backward passes before such a step", 0, 0),
            fact("such steps so far", int(empty.sum())),
        ),
        cause=f"{track.name} steps more than once with the same gradients: every other step repeats the one before.",
        fix="Call optimizer.step() once per backward pass; look for a second call in a helper, a callback or at the "
        "end of the loop.",
        refute="Count calls of loss.backward() and of optimizer.step() over an epoch: equal counts, or fewer steps, "
        "refute it.",
    )


RULE = Rule(kind="double_step", check=check, since=4)
