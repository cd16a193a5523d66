"""Targets that the output's activation can never reach."""

from __future__ import annotations

import numpy as np

from sonde import schema, vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.outputs import bounds
from sonde.diagnosis.ownership import last_module
from sonde.diagnosis.rule import Rule, above, fact
from sonde.diagnosis.seen_loss import SeenLoss, seen_losses
from sonde.records import Finding
from sonde.schema import Rows

_LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
_RANGES = {
    "Sigmoid": (0.0, 1.0),
    "Hardsigmoid": (0.0, 1.0),
    "Softmax": (0.0, 1.0),
    "Tanh": (-1.0, 1.0),
    "Hardtanh": (-1.0, 1.0),
    "Softsign": (-1.0, 1.0),
    "ReLU": (0.0, float("inf")),
    "Softplus": (0.0, float("inf")),
}


def check(case: Case) -> Finding | None:
    """Find a bounded activation at the end of the model, and targets outside its range in several batches."""
    for loss in seen_losses(case, *_LOSSES):
        target = loss.target
        found = _range_of(case, loss)
        if target is None or found is None or len(target) < thresholds.LOSS_LOOKS.value:
            continue
        culprit, (low, high) = found
        recent = target.last(5)
        least, most = bounds(recent)
        spread = float(np.median(recent.stat("std")))
        outside = np.maximum(low - least, most - high)
        if (
            spread > 0
            and bool((outside > thresholds.RANGE_MARGIN.value * spread).all())
            and _matters(recent.rows, low, high)
        ):
            return _finding(
                case, culprit, (low, high), float(least.min()), float(most.max()), float(outside.max() / spread)
            )
    return None


def _range_of(case: Case, loss: SeenLoss) -> tuple[str, tuple[float, float]] | None:
    """Return the last module and its range, if what it returns is what the loss is given."""
    name = last_module(case)
    module = case.modules.get(name or "")
    if name is None or module is None or module.kind not in _RANGES:
        return None
    output = case.track(f"{name}:output")
    if output is None or not np.array_equal(
        output.rows[-1, [schema.MIN, schema.MAX]], loss.values.rows[-1, [schema.MIN, schema.MAX]]
    ):
        return None
    return name, _RANGES[module.kind]


def _matters(rows: Rows, low: float, high: float) -> bool:
    """Say whether more than single outliers lie outside: the mean is within a spread of an end, or beyond it."""
    means, spreads = rows[:, schema.MEAN], np.sqrt(rows[:, schema.M2] / np.maximum(rows[:, schema.COUNT], 1))
    return bool(np.median(np.minimum(means - low, high - means) - 2 * spreads) < 0)


def _finding(
    case: Case, culprit: str, reach: tuple[float, float], least: float, most: float, outside: float
) -> Finding:
    return RULE.finding(
        case,
        "warning",
        0.93,
        sites=(culprit, vitals.LOSS),
        step=1,
        evidence=(
            above("distance of targets beyond the range, in spreads of the target", outside, thresholds.RANGE_MARGIN),
            fact("smallest target", least, "loss_fn:input.target min"),
            fact("largest target", most, "loss_fn:input.target max"),
        ),
        cause=f"The model ends in {culprit}, whose outputs lie between {reach[0]:g} and {reach[1]:g}, but targets run "
        f"from {least:.3g} to {most:.3g}: some can never be reached.",
        fix=f"End in a linear layer without {culprit}, or scale the targets into its range.",
        refute="If all targets lie within the range of the last activation, it is wrong.",
    )


RULE = Rule(kind="output_range_mismatch", check=check, since=2)
