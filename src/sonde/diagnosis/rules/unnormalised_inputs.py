"""Inputs of very different, or very large, scale."""

from __future__ import annotations

import numpy as np

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.batches import is_real, model_input, normalises_inside
from sonde.diagnosis.case import Case
from sonde.diagnosis.outlook import began_badly, gravity
from sonde.diagnosis.rule import Rule, above
from sonde.diagnosis.track import Track
from sonde.records import Evidence, Finding


def check(case: Case) -> Finding | None:
    """Find real-valued inputs that are large, far from zero, or whose features differ in scale a thousandfold."""
    track = model_input(case)
    if not is_real(track) or normalises_inside(case):
        return None
    evidence = _columns(case, track) or _whole(track)
    if evidence is None:
        return None
    return RULE.finding(
        case,
        "warning" if began_badly(case) else gravity(case),
        0.85,
        sites=("loader", track.name),
        step=int(track.steps[0]),
        evidence=evidence,
        cause="Inputs are not normalised: a few large numbers decide everything, and the first layer is badly scaled.",
        fix="Standardise each feature with the training set's mean and standard deviation; divide pixels by 255.",
        refute="Train 50 steps on (x - mean) / std: if the loss behaves the same, the inputs are not to blame.",
    )


def _columns(case: Case, track: Track) -> tuple[Evidence, ...] | None:
    scales = case.vital(track.name, vitals.COLUMN_SCALE)
    if scales is None:
        return None
    high, low = float(np.median(scales.stat("max"))), float(np.median(scales.stat("min")))
    if low <= 0:  # a constant feature says nothing about scale
        low = float(np.median(scales.stat("mean")))
    ratio = high / low if low > 0 else 0.0
    if ratio < thresholds.COLUMN_RATIO.value or high < thresholds.COLUMN_LARGE.value:
        return None
    return (
        above("largest over smallest standard deviation of a feature", ratio, thresholds.COLUMN_RATIO),
        above("standard deviation of the largest feature", high, thresholds.COLUMN_LARGE, f"{scales.key} max"),
    )


def _whole(track: Track) -> tuple[Evidence, ...] | None:
    size, std = float(np.median(track.stat("rms"))), float(np.median(track.stat("std")))
    offset = abs(float(np.median(track.stat("mean")))) / std if std > 0 else 0.0
    if offset >= thresholds.INPUT_OFFSET.value and size >= 1:
        return (above("distance of the inputs from zero in standard deviations", offset, thresholds.INPUT_OFFSET),)
    if size >= thresholds.INPUT_LARGE.value:
        return (above("size (rms) of the inputs", size, thresholds.INPUT_LARGE, f"{track.key} rms"),)
    return None


RULE = Rule(kind="unnormalised_inputs", check=check, since=3)
