"""Labels that do not belong to their inputs."""

from __future__ import annotations

import math

import numpy as np

from sonde import schema, vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.outlook import chance_loss, is_near_chance
from sonde.diagnosis.rule import Rule, above, below, fact
from sonde.diagnosis.weights import last_weights
from sonde.records import Finding

_PATIENCE_WITH_WORDS = 2.5


def check(case: Case) -> Finding | None:
    """Find inputs whose nearest neighbours agree no more than by chance, and a loss that stays at guessing."""
    agreement = case.need_vital(vitals.LOSS, vitals.NEIGHBOUR_AGREEMENT)
    counts = case.need_vital(vitals.LOSS, vitals.LABEL_COUNTS)
    patience = thresholds.MISMATCH_STEPS.value * (_PATIENCE_WITH_WORDS if _reads_words(case) else 1)
    if case.learning.points < patience or not _is_stuck(case):
        return None
    samples = float(agreement.stat("count")[-1])
    share, chance = float(agreement.numbers()[-1]), _chance(counts.rows)
    if not 0 < chance < 0.9 or _says_one_thing(case):
        return None
    sigma = math.sqrt(chance * (1 - chance) / max(samples, 1))
    limit = chance + thresholds.MISMATCH_SIGMAS.value * sigma
    if share > limit:
        return None
    learning, entropy = case.learning, chance_loss(case) or float("nan")
    return RULE.finding(
        case,
        "warning",
        0.85,
        sites=("loader",),
        step=int(agreement.steps[-1]),
        evidence=(
            below("share of samples whose nearest neighbour has the same label", share, limit, f"{agreement.key} mean"),
            fact("the same by chance", chance),
            above("loss over the entropy of the labels", learning.recent / entropy, thresholds.MISMATCH_LOSS),
        ),
        cause="Labels do not belong to their inputs: samples that look alike agree no more than by chance, and the "
        "model learns nothing but how frequent labels are.",
        fix="Check where inputs and labels are shuffled, sorted or filtered: both need the same indices.",
        refute="Look at twenty samples with their labels: if they are right, it is not this.",
    )


def _says_one_thing(case: Case) -> bool:
    """Say whether the model gave all samples one answer from the first step on: then it cannot tell them apart."""
    spread = case.vital(vitals.LOSS, vitals.SAMPLE_SPREAD)
    inputs = case.track(f"{vitals.LOSS}:input.input")
    if spread is None or inputs is None:
        return False
    size = float(inputs.stat("rms")[0])
    return float(spread.numbers()[0]) <= thresholds.OUTPUT_SPREAD.value * min(1.0, size**2)


def _reads_words(case: Case) -> bool:
    """Say whether the model is given whole numbers: counting words says less of a text than pixels say of a picture."""
    first = next((site for site in case.sites("input") if site.name != vitals.LOSS), None)
    return first is not None and "int" in first.dtype


def _is_stuck(case: Case) -> bool:
    pace = last_weights(case).pace()
    moves = len(pace) > 0 and float(np.median(pace)) >= thresholds.PACE_LOW.value
    return moves and is_near_chance(case, thresholds.MISMATCH_LOSS.value)


def _chance(rows: schema.Rows) -> float:
    """Return how often two labels are equal, without the bias of small batches."""
    classes, mean = rows[:, schema.COUNT], rows[:, schema.MEAN]
    totals = classes * mean
    squares = rows[:, schema.M2] + classes * mean**2
    usable = totals > 1
    if not usable.any():
        return float("nan")
    totals, squares = totals[usable], squares[usable]
    return float((squares - totals).sum() / (totals * (totals - 1)).sum())


RULE = Rule(kind="label_shuffle_mismatch", check=check, since=int(thresholds.MISMATCH_STEPS.value))
