"""Data that come class by class."""

from __future__ import annotations

import numpy as np

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Rule, above, below, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find batches whose labels are far less mixed than the labels of all batches together."""
    batch = case.need_vital(vitals.LOSS, vitals.LABEL_ENTROPY)
    running = case.need_vital(vitals.LOSS, vitals.RUNNING_LABEL_ENTROPY)
    sizes = case.need_vital(vitals.LOSS, vitals.VALID_TARGETS)
    loss = case.loss_facts("cross_entropy", "nll_loss")
    if loss is None or len(loss.target_shape) != 1:  # texts and images are streams of labels by nature
        return None
    looks = int(thresholds.BATCH_LOOKS.value)
    if len(batch) < looks or len(batch) != len(running) or len(batch) != len(sizes):
        return None
    size = float(np.median(sizes.numbers()))
    mixed = float(running.numbers()[-1])
    if size < 8 or mixed < 0.3:
        return None
    recent = batch.numbers()[-4 * looks :]
    expected = min(mixed, float(np.log(size)))
    ratio = float(recent.mean()) / expected
    if ratio > thresholds.BATCH_ENTROPY.value or np.median(recent[-looks:]) > 0.8 * expected:
        return None
    return RULE.finding(
        case,
        "warning",
        0.9,
        sites=("loader",),
        step=int(batch.steps[0]),
        evidence=(
            below(
                "entropy of a batch's labels over what it should be",
                ratio,
                thresholds.BATCH_ENTROPY,
                f"{batch.key} mean",
            ),
            fact("entropy of all labels so far, in nats", mixed, f"{running.key} mean"),
            above("batches looked at", len(recent), thresholds.BATCH_LOOKS),
        ),
        cause="The data are not shuffled: batches hold only one or few classes each, and the model forgets the others.",
        fix="Pass shuffle=True to the DataLoader, or shuffle the indices of every epoch.",
        refute="Print the labels of three batches: if all classes come in each, they are shuffled.",
    )


RULE = Rule(kind="not_shuffled", check=check, since=int(thresholds.BATCH_LOOKS.value))
