"""A moving average of weights that does not move."""

from __future__ import annotations

import numpy as np

from sonde import measures
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.ownership import by_number, few
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find copies of trained weights that are written to step by step and stay what they were.

    A copy that nobody writes to is meant to stay, as a teacher is.
    """
    copies = [each for each in case.need_facts().parameters if each.equal_to and not each.owners and not each.trainable]
    copies = [each for each in copies if _is_rewritten(case, each.name)]
    moved = {track.name for track in case.of("update") if float(measures.norm(track.rows[-1])) > 0} if copies else set()
    stuck = [each for each in copies if moved.intersection(each.equal_to)]
    if not stuck:
        return None
    names = [each.name for each in stuck]
    track = case.track(f"{names[0]}:parameter")
    return RULE.finding(
        case,
        "warning",
        0.93,
        sites=tuple(names),
        step=1,
        evidence=(
            above("times it was written to", 0 if track is None else len(track) - 1, thresholds.UNUSED_STEPS),
            fact("change since the start", 0.0, f"{names[0]}:parameter norm"),
            fact("copies like that", len(names)),
        ),
        cause=f"{few(names)} "
        + by_number(
            names,
            "is written to after every step but never changes",
            "are written to after every step but never change",
        )
        + ", while the weights that are averaged do: the average has a decay of 1.",
        fix="Use a decay below 1 (0.999), and see that average.lerp_(weight, 1 - decay) gets the current weights.",
        refute="Compare the copy with what it was at the start: a difference refutes it.",
    )


def _is_rewritten(case: Case, name: str) -> bool:
    track = case.track(f"{name}:parameter")
    if track is None or len(track) <= thresholds.UNUSED_STEPS.value:
        return False
    return not np.any(np.diff(track.rows, axis=0))


RULE = Rule(kind="ema_not_updated", check=check, since=10)
