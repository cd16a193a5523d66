"""Steps so long that the loss does not fall."""

from __future__ import annotations

import numpy as np

from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.outlook import is_failing
from sonde.diagnosis.rule import Rule, above, fact
from sonde.diagnosis.track import Values
from sonde.diagnosis.weights import Weights, first_weights, last_weights
from sonde.records import Evidence, Finding


def check(case: Case) -> Finding | None:
    """Find weights that move by a large part of their size at each step while the loss gets nowhere."""
    found = case.loss()
    if found is None:
        raise NotMeasured("the loss")
    if not is_failing(case):
        return None
    first = first_weights(case)
    early, late = first.pace(), last_weights(case).pace()
    if not len(early):
        raise NotMeasured("updates")
    if case.learning.state == "broken" and not _was_out_of_order(found[1], early):
        return None
    leaps = _count(early, thresholds.PACE_HIGH.value)
    overshoot = _overshoot(found[1])
    worse = case.learning.state in ("worse", "broken")
    evidence = _evidence(early, late, overshoot)
    if leaps >= thresholds.PACE_STEPS.value or (leaps and case.learning.state == "broken"):
        rose = overshoot >= thresholds.OVERSHOOT.value or worse
        return _finding(case, first, 0.9 if rose else 0.65, evidence)
    if worse and overshoot >= thresholds.OVERSHOOT.value:
        fast = max(_count(early, thresholds.PACE_HIGH_WORSE.value), _count(late, thresholds.PACE_HIGH_WORSE.value))
        if fast >= thresholds.PACE_STEPS.value:
            return _finding(case, first, 0.8, evidence)
    return None


def _was_out_of_order(losses: Values, early: Values) -> bool:
    """Say whether something was wrong before the loss broke: only then can the step length be what broke it.

    A loss that fell until an odd batch made it NaN had no trouble with the length of its steps. One that broke at once,
    after a step longer than the weights themselves, gave no other sign.
    """
    bad = np.flatnonzero(~np.isfinite(losses))
    before = losses[: bad[0]] if len(bad) else losses
    if len(before) < thresholds.PACE_STEPS.value:
        return bool(len(early) and early[:3].max() >= 1)
    return _overshoot(before) >= thresholds.OVERSHOOT.value or bool(before[-1] > before[0])


def _count(pace: Values, limit: float) -> int:
    return int((pace >= limit).sum())


def _overshoot(losses: Values) -> float:
    """Return the highest loss over the first."""
    finite = losses[np.isfinite(losses)]
    if len(finite) < len(losses):
        return float("inf")
    return float(finite.max() / abs(finite[0])) if len(finite) and finite[0] else 0.0


def _evidence(early: Values, late: Values, overshoot: float) -> tuple[Evidence, ...]:
    return (
        above("update of a weight over its size, highest of the first steps", early.max(), thresholds.PACE_HIGH_WORSE),
        fact("the same over the last steps, median", float(np.median(late)) if len(late) else float("nan")),
        fact("highest loss over the first", overshoot, "loss:scalar mean"),
    )


def _finding(case: Case, first: Weights, confidence: float, evidence: tuple[Evidence, ...]) -> Finding:
    rate = case.learning_rate()
    at = "" if rate is None else f" (at a rate of {rate[1].max():.3g})"
    ratios = first.update_ratio
    fastest = np.argsort(-np.nan_to_num(np.nanmax(np.nan_to_num(ratios), axis=0)))[:3]
    return RULE.finding(
        case,
        "critical" if case.learning.state == "broken" else "warning",
        confidence,
        sites=("optimizer", *(first.names[index] for index in fastest)),
        step=int(first.steps[0]),
        evidence=evidence,
        cause=f"The learning rate is too high: steps move weights by a large part of their size{at}, and the loss "
        "does not fall.",
        fix="Divide the learning rate by 10 (or find one with sonde.checkup), or warm it up.",
        refute="Train 100 steps at a tenth of the rate: if the loss does not fall then either, it was not the rate.",
    )


RULE = Rule(kind="lr_too_high", check=check, since=8)
