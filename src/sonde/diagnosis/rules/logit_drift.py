"""Logits that drift away together."""

from __future__ import annotations

import numpy as np

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.outlook import gravity
from sonde.diagnosis.rule import Rule, above
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find a log of the sum of exponentials that is large and has grown since the start."""
    track = case.need_vital(vitals.LOSS, vitals.LOG_Z)
    values = np.abs(track.numbers())
    if len(values) < 6 or not np.isfinite(values).all():
        return None
    now, before = float(np.min(values[-3:])), float(np.median(values[:3]))
    if now < thresholds.LOG_Z_HIGH.value or now < thresholds.LOG_Z_GROWTH.value * before:
        return None
    return RULE.finding(
        case,
        gravity(case),
        0.7,
        sites=("(model)",),
        step=int(track.steps[values >= thresholds.LOG_Z_HIGH.value][0]),
        evidence=(
            above("log of the sum of exponentials of the logits", now, thresholds.LOG_Z_HIGH, f"{track.key} mean"),
            above("the same over that of the first steps", now / max(before, 1e-9), thresholds.LOG_Z_GROWTH),
        ),
        cause="The logits drift: all of them grow, which the loss does not see but low precision does.",
        fix="Add a small penalty on log Z (1e-4 * log_z ** 2), lower the learning rate, or decay the head's weight.",
        refute="Plot log Z over the run: if it has levelled off, it does no harm.",
    )


RULE = Rule(kind="logit_drift", check=check, since=6)
