"""Evaluation inputs that were prepared in another way than those of training."""

from __future__ import annotations

import numpy as np

from sonde import schema
from sonde.diagnosis import thresholds
from sonde.diagnosis.batches import is_real, model_input
from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Rule, above, fact
from sonde.diagnosis.track import Track
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find a mean or a spread of evaluation inputs that training batches never have."""
    train, evaluated = model_input(case), model_input(case, "eval")
    if not is_real(train) or len(train) < 5 or train.name != evaluated.name:
        return None
    std, other = _std(train), _std(evaluated)
    if not (std > 0 and other > 0):
        return None
    mean, other_mean = float(train.total()[schema.MEAN]), float(evaluated.total()[schema.MEAN])
    shift = abs(other_mean - mean) / std
    noise = float(np.std(train.stat("mean"))) / std
    stretch = max(std / other, other / std)
    moved = shift >= thresholds.INPUT_SHIFT.value and shift >= thresholds.INPUT_SHIFT_SIGMAS.value * noise
    if not moved and stretch < thresholds.INPUT_STRETCH.value:
        return None
    worst = (
        above("distance of the means in standard deviations", shift, thresholds.INPUT_SHIFT, f"{evaluated.key} mean")
        if moved
        else above("ratio of the spreads", stretch, thresholds.INPUT_STRETCH, f"{evaluated.key} std")
    )
    return RULE.finding(
        case,
        "warning",
        0.8,
        sites=("loader", train.name),
        step=int(evaluated.steps[0]),
        evidence=(
            worst,
            fact("standard deviation of training inputs", std, f"{train.key} std"),
            fact("standard deviation of evaluation inputs", other, f"{evaluated.key} std"),
        ),
        cause=f"Evaluation inputs are prepared differently: mean {other_mean:.3g} and spread {other:.3g} against "
        f"{mean:.3g} and {std:.3g} in training.",
        fix="Use the same normalisation for both, with the training set's mean and standard deviation.",
        refute="Print the mean and standard deviation of one batch of each loader: equal ones refute it.",
    )


def _std(track: Track) -> float:
    total = track.total()
    count = total[schema.COUNT] - 1
    return float(np.sqrt(total[schema.M2] / count)) if count > 0 else 0.0


RULE = Rule(kind="train_val_preproc_mismatch", check=check, since=5)
