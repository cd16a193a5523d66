"""Gradients that are clipped at nearly every step."""

from __future__ import annotations

import numpy as np

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.outlook import is_failing, is_learning_well
from sonde.diagnosis.rule import Rule, above
from sonde.diagnosis.track import Track
from sonde.diagnosis.weights import last_weights
from sonde.records import Finding, Severity


def check(case: Case) -> Finding | None:
    """Find an optimizer most of whose gradients exceed the limit, by much."""
    norms = case.vitals(vitals.CLIP_NORM)
    if not norms:
        raise NotMeasured("optimizer:vital.clip_norm")
    for track in norms:
        limits = case.vital(track.name, vitals.CLIP_MAX)
        if limits is not None and (found := _judge(case, track.last(100), limits.last(100))) is not None:
            return found
    return None


def _judge(case: Case, norms: Track, limits: Track) -> Finding | None:
    limit = float(np.median(limits.numbers()))
    values = norms.numbers()
    if len(values) < thresholds.CLIP_LOOKS.value or not (np.isfinite(limit) and limit > 0):
        return None
    share = float((values > limit).mean())
    factor = float(np.median(values)) / limit
    if share <= thresholds.CLIPPED_SHARE.value or factor < thresholds.CLIPPED_FACTOR.value:
        return None
    typical = float(np.nanquantile(values[np.isfinite(values)], 0.9)) if np.isfinite(values).any() else float("nan")
    return RULE.finding(
        case,
        _severity(case, norms.name, factor),
        0.9 if factor > 30 else 0.75,
        sites=(norms.name,),
        step=int(norms.steps[values > limit][0]),
        evidence=(
            above("share of the last updates that were clipped", share, thresholds.CLIPPED_SHARE),
            above("median norm over the limit", factor, thresholds.CLIPPED_FACTOR, f"{norms.key} mean"),
        ),
        cause=f"Gradients are clipped at almost every step: the limit of {limit:.3g} is {factor:.0f} times below the "
        "usual norm, so every step has the same short length.",
        fix=f"Raise max_norm to about {typical:.3g} (nine of ten norms lie below), or lower the learning rate instead.",
        refute="Train with the limit raised a hundredfold: if the loss behaves the same, clipping is not to blame.",
    )


def _severity(case: Case, name: str, factor: float) -> Severity:
    # Adam divides by the gradient's own size: clipping by a constant factor cancels out.
    kind = next((optimizer.kind for optimizer in case.facts.optimizers if optimizer.name == name), "")
    short = factor >= thresholds.CLIPPED_GRAVE.value and "Ada" not in kind
    return "warning" if short and (is_failing(case) or _crawls(case)) else "info"


def _crawls(case: Case) -> bool:
    """Say whether steps are short, and the loss is far from where it could be expected by now."""
    try:
        pace = last_weights(case).pace()
    except NotMeasured:
        return False
    slow = len(pace) > 0 and float(np.median(pace)) <= thresholds.CLIPPED_PACE.value
    enough = case.learning.points >= 2 * thresholds.CLIP_LOOKS.value
    return slow and enough and not is_learning_well(case)


RULE = Rule(kind="clip_always_active", check=check, since=int(thresholds.CLIP_LOOKS.value))
