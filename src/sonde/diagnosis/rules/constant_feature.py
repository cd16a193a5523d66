"""Features that never vary."""

from __future__ import annotations

import numpy as np

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.batches import is_real, model_input
from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find a table most of whose features have the same value in every sample."""
    track = model_input(case)
    scales = case.need_vital(track.name, vitals.COLUMN_SCALE)
    if not is_real(track) or len(scales) < 3:
        return None
    share = float(scales.stat("zero_share").min())
    samples = float(np.median(track.stat("count"))) / max(1.0, float(scales.stat("count")[-1]))
    if not thresholds.CONSTANT_SHARE.value <= share < 1 or samples < 32:
        return None
    return RULE.finding(
        case,
        "info",
        0.8,
        sites=("loader", track.name),
        step=int(track.steps[0]),
        evidence=(
            above("share of features that are constant", share, thresholds.CONSTANT_SHARE, f"{scales.key} zero_share"),
            fact("looks", len(scales)),
        ),
        cause=f"{share:.0%} of the input's features have the same value in every sample: they tell nothing.",
        fix="Check how features are read and filled in; leave constant ones out.",
        refute="Compute the standard deviation of each feature over the training set: none at 0 refutes it.",
    )


RULE = Rule(kind="constant_feature", check=check, since=3)
