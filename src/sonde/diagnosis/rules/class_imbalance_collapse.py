"""A model that always answers with the most frequent class."""

from __future__ import annotations

import math

import numpy as np

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Rule, below, fact
from sonde.records import Finding, Severity


def check(case: Case) -> Finding | None:
    """Find very uneven labels and a model that, after many steps, still answers with one class only."""
    labels = case.need_vital(vitals.LOSS, vitals.RUNNING_LABEL_ENTROPY)
    predicted = case.need_vital(vitals.LOSS, vitals.PREDICTED_ENTROPY)
    loss = case.loss_facts("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")
    entropy = float(labels.numbers()[-1])
    late = predicted.since(int(thresholds.IMBALANCE_STEPS.value)).numbers()
    if loss is None or math.prod(loss.target_shape[1:]) != 1 or len(late) < 2 or len(case.facts.optimizers) > 1:
        return None
    uneven = 0 < entropy <= thresholds.IMBALANCE_ENTROPY.value
    answer = float(np.max(late[-3:]))
    if not uneven or answer > thresholds.PREDICTED_ENTROPY.value:
        return None
    counts = case.vital(vitals.LOSS, vitals.LABEL_COUNTS)
    rows = None if counts is None else counts.stat("max") / (counts.stat("mean") * counts.stat("count"))
    return RULE.finding(
        case,
        _severity(case, entropy, weighted=bool(loss.settings.get("weighted"))),
        0.8,
        sites=("loader", "loss_fn"),
        step=int(predicted.steps[-len(late)]),
        evidence=(
            below("entropy of the labels in nats", entropy, thresholds.IMBALANCE_ENTROPY, f"{labels.key} mean"),
            below("entropy of the answers in nats", answer, thresholds.PREDICTED_ENTROPY, f"{predicted.key} mean"),
            fact("share of the most frequent label", float("nan") if rows is None else float(np.median(rows))),
        ),
        cause="One class is so frequent that the model always answers with it: high accuracy, nothing learnt."
        + (" The weights of the loss do not make up for it." if loss.settings.get("weighted") else ""),
        fix="Make the weights of classes fall with their number (1 / count, not count), and look at recall."
        if loss.settings.get("weighted")
        else "Weight the loss (nn.CrossEntropyLoss(weight=...)), use a WeightedRandomSampler, and look at recall.",
        refute="Compute the recall of the rare class: above 0 refutes it.",
    )


def _severity(case: Case, entropy: float, *, weighted: bool) -> Severity:
    learning = case.learning
    if weighted:  # somebody meant rare classes to count, and what the loss is says nothing about the labels
        return "warning" if learning.points else "info"
    return "warning" if learning.points and learning.recent >= 0.5 * entropy else "info"


RULE = Rule(kind="class_imbalance_collapse", check=check, since=int(thresholds.IMBALANCE_STEPS.value))
