"""A sampler that draws few samples of many, again and again."""

from __future__ import annotations

import math

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.batches import model_input
from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Rule, below, fact
from sonde.records import Finding

# These draw every sample once: where rows repeat then, the data has copies.
_COMPLETE = ("RandomSampler", "SequentialSampler", "DistributedSampler")
_COUNTED = 1024


def check(case: Case) -> Finding | None:
    """Find far fewer different rows than even drawing from a data set of that size would give."""
    loader = case.facts.loader
    length = None if loader is None else loader.settings.get("dataset_length")
    if loader is None or not isinstance(length, int) or loader.settings.get("sampler") in _COMPLETE:
        return None
    track = model_input(case)
    distinct = float(case.need_vital(track.name, vitals.DISTINCT_ROWS).numbers()[-1])
    # Drawing n times from N, each as likely as the others, meets N (1 - (1 - 1/N)^n) different ones.
    expected = -length * math.expm1(_COUNTED * math.log1p(-1 / length)) if length > 1 else 1.0
    if distinct >= thresholds.DRAWN_SHARE.value * expected:
        return None
    return RULE.finding(
        case,
        "warning",
        0.9,
        sites=("loader",),
        step=1,
        evidence=(
            below("different rows over what even drawing gives", distinct / expected, thresholds.DRAWN_SHARE),
            fact(f"different rows among the first {_COUNTED} or so", distinct),
            fact("samples in the data", length),
        ),
        cause=f"{loader.settings.get('sampler')} draws the same {distinct:.0f} samples again and again, of {length}: "
        "the model never sees the others.",
        fix="Give WeightedRandomSampler a weight for each sample (class_weights[labels]), not one for each class.",
        refute="Collect the indices of one epoch: if most of the data is among them, it is wrong.",
    )


RULE = Rule(kind="sampler_draws_few", check=check, since=10)
