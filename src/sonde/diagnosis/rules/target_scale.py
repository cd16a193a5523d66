"""Targets of a regression that are huge or far from zero."""

from __future__ import annotations

import numpy as np

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.outlook import gravity
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find targets of real numbers whose spread or distance from zero is far from what a fresh layer puts out."""
    if case.loss_facts("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss") is None:
        raise NotMeasured("a loss of real numbers")
    target = case.track(f"{vitals.LOSS}:input.target")
    if target is None or "float" not in target.site.dtype:
        raise NotMeasured("loss_fn:input.target")
    std, mean = float(np.median(target.stat("std"))), float(np.median(target.stat("mean")))
    offset = abs(mean) / std if std > 0 else 0.0
    if std >= thresholds.TARGET_STD.value:
        worst = above("standard deviation of the target", std, thresholds.TARGET_STD, f"{target.key} std")
    elif offset >= thresholds.TARGET_OFFSET.value and abs(mean) >= 10:
        worst = above("distance of the target from zero in standard deviations", offset, thresholds.TARGET_OFFSET)
    elif (reach := _reach(case, mean, std)) >= thresholds.TARGET_REACH.value and gravity(case) == "warning":
        worst = above("size of the target over that of the first outputs", reach, thresholds.TARGET_REACH)
    else:
        return None
    return RULE.finding(
        case,
        gravity(case),
        0.8,
        sites=("loader", "loss_fn"),
        step=int(target.steps[0]),
        evidence=(worst, fact("mean of the target", mean, f"{target.key} mean")),
        cause="The target is badly scaled: a fresh model puts out numbers near 0, and gradients are as large as the "
        "distance.",
        fix="Train on (y - y.mean()) / y.std() and scale predictions back, or set the last bias to the mean.",
        refute="Train 50 steps on the standardised target: if the loss falls no faster, it is not this.",
    )


def _reach(case: Case, mean: float, std: float) -> float:
    """Return how many times as large as the model's first outputs the target is; 0 if that is not known."""
    outputs = case.track(f"{vitals.LOSS}:input.input")
    first = float(outputs.stat("rms")[0]) if outputs is not None and len(outputs) else 0.0
    size = float(np.hypot(mean, std))
    return size / first if first > 0 and size >= 1 else 0.0


RULE = Rule(kind="target_scale", check=check, since=3)
