"""Attention that looks at one place only."""

from __future__ import annotations

import numpy as np

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.outlook import gravity, is_learning_well
from sonde.diagnosis.rule import Rule, below, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find attention whose heads, on average, have become certain since the start; a few such heads are normal."""
    tracks = case.vitals(vitals.ATTENTION_ENTROPY)
    if not tracks:
        raise NotMeasured("module:vital.attention_entropy")
    for track in tracks:
        values = track.numbers()
        if len(values) < 5:
            continue
        now, before = float(np.median(values[-5:])), float(np.median(values[:5]))
        fell = before - now >= thresholds.ATTENTION_FALL.value and now <= thresholds.ATTENTION_LOW.value
        if fell or max(now, before) <= thresholds.ATTENTION_BORN.value:
            return RULE.finding(
                case,
                gravity(case) if fell or is_learning_well(case) else "warning",
                0.75,
                sites=(track.name,),
                step=int(track.steps[values <= thresholds.ATTENTION_BORN.value][0]),
                evidence=(
                    below(
                        "entropy of attention over its highest, mean of heads",
                        now,
                        thresholds.ATTENTION_BORN,
                        f"{track.key} mean",
                    ),
                    fact("fall since the first steps", before - now),
                ),
                cause=f"The attention of {track.name} has collapsed: every row looks at one place, and its gradient "
                "vanishes.",
                fix="Normalise queries and keys (qk-norm), lower the learning rate or warm it up.",
                refute="Draw its attention maps: rows with several bright places refute it.",
            )
    return None


RULE = Rule(kind="attention_entropy_collapse", check=check, since=5)
