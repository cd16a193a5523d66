"""Steps so short that nothing changes."""

from __future__ import annotations

import numpy as np

from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.outlook import chance_loss, is_near_chance
from sonde.diagnosis.rule import Rule, below, fact
from sonde.diagnosis.weights import last_weights
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find weights that hardly move for many steps though they have gradients, with a loss that stays where it was."""
    if case.loss() is None:
        raise NotMeasured("the loss")
    weights = last_weights(case)
    pace = weights.fastest()
    if len(pace) < thresholds.PACE_LOW_STEPS.value or not _stays_put(case) or _is_scheduled(case):
        return None
    # A model that begins well trained may rest: then the loss is far below guessing.
    known = chance_loss(case) is not None
    limit = thresholds.PACE_VERY_LOW
    if known and is_near_chance(case):
        limit = thresholds.PACE_SLOW if case.learning.falls else thresholds.PACE_LOW
    highest = float(pace[-int(thresholds.PACE_LOW_STEPS.value) :].max())
    gradients = weights.gradient_ratio[-5:, -1]
    if highest >= limit.value or not np.nanmax(np.nan_to_num(gradients)) > 0:
        return None
    alive = float(np.nanmax(gradients))
    if alive < 1e-6:  # there is nothing to step along: that is another disease
        return None
    rate = case.learning_rate()
    return RULE.finding(
        case,
        "warning",
        0.85 if known else 0.75,
        sites=("optimizer",),
        step=int(weights.steps[0]),
        evidence=(
            below("update of a weight over its size, fastest weight, highest of the last steps", highest, limit),
            fact("gradient of the last weight over its size", alive, f"{weights.names[-1]}:gradient rms"),
            fact("learning rate", float("nan") if rate is None else float(rate[1][-1])),
        ),
        cause="The learning rate is too low: steps change the weights by almost nothing, and the loss stays put.",
        fix="Raise the learning rate tenfold until the loss moves; sonde.checkup suggests one.",
        refute="Train 100 steps at 100 times the rate: if the loss stays put then too, it was not the rate.",
    )


def _stays_put(case: Case) -> bool:
    """Say whether the loss does not fall. That it seems to rise is chance, where steps are that short."""
    return case.learning.state in ("flat", "worse")


def _is_scheduled(case: Case) -> bool:
    """Say whether the rate is on its way: rising in a warm-up, or far below what it was before."""
    rate = case.learning_rate()
    if rate is None or len(rate[1]) < 2:
        return False
    values = rate[1]
    before = values[max(0, len(values) - 11)]
    return bool(values[-1] > before * 1.05 or values[-1] < 0.1 * values.max())


RULE = Rule(kind="lr_too_low", check=check, since=int(thresholds.PACE_LOW_STEPS.value))
