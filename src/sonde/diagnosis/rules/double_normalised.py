"""Inputs that were scaled down twice."""

from __future__ import annotations

import numpy as np

from sonde.diagnosis import thresholds
from sonde.diagnosis.batches import is_real, model_input, normalises_inside
from sonde.diagnosis.case import Case
from sonde.diagnosis.outlook import gravity
from sonde.diagnosis.rule import Rule, below, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find real-valued inputs that all lie close to each other and to zero."""
    track = model_input(case)
    if not is_real(track) or normalises_inside(case):
        return None
    spread, largest = float(np.median(track.stat("std"))), float(track.stat("abs_max").max())
    if not 0 < spread <= thresholds.INPUT_TINY.value or largest > 10 * thresholds.INPUT_TINY.value:
        return None
    return RULE.finding(
        case,
        gravity(case),
        0.85,
        sites=("loader", track.name),
        step=int(track.steps[0]),
        evidence=(
            below("standard deviation of the inputs", spread, thresholds.INPUT_TINY, f"{track.key} std"),
            fact("largest input", largest, f"{track.key} abs_max"),
        ),
        cause="Inputs are tiny: they were scaled down twice, and samples hardly differ.",
        fix="Normalise once: divide by 255 or use ToTensor(), not both.",
        refute="Train 50 steps on inputs scaled to a standard deviation of 1: a loss that behaves the same refutes it.",
    )


RULE = Rule(kind="double_normalised", check=check, since=3)
