"""Micro-batches that count alike, though some hold far more targets than others."""

from __future__ import annotations

import numpy as np

from sonde import schema, vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.rule import Rule, above
from sonde.records import Finding

_STEPS = 2


def check(case: Case) -> Finding | None:
    """Find accumulated means over numbers of targets that differ within a step."""
    valid = case.need_vital(vitals.LOSS, vitals.VALID_TARGETS)
    backwards = case.need_vital(vitals.LOOP, vitals.BACKWARDS)
    loss = case.loss_facts("cross_entropy", "nll_loss")
    if loss is None:
        raise NotMeasured("a loss of classes")
    times = float(np.median(backwards.numbers()))
    if times < 2 or loss.settings.get("reduction", "mean") != "mean" or len(case.facts.optimizers) > 1:
        return None
    rows = valid.rows[(valid.rows[:, schema.COUNT] > 1) & (valid.rows[:, schema.MIN] > 0)]
    if len(rows) < _STEPS:
        return None
    ratio = float(np.median(rows[:, schema.MAX] / rows[:, schema.MIN]))
    if ratio < thresholds.UNEQUAL_TARGETS.value:
        return None
    return RULE.finding(
        case,
        "warning" if ratio >= thresholds.UNEQUAL_GRAVE.value else "info",
        0.85,
        sites=(vitals.LOSS,),
        step=int(valid.steps[0]),
        evidence=(
            above("most targets of a micro-batch over fewest, within a step", ratio, thresholds.UNEQUAL_TARGETS),
            above("backward passes per step", times, 2, f"{backwards.key} mean"),
        ),
        cause=f"Each step averages {times:g} means that were taken over different numbers of targets: a target in a "
        f"short micro-batch weighs up to {ratio:.1f} times one in a long one.",
        fix="Compute the loss with reduction='sum' in each micro-batch and divide by the number of targets of the "
        "whole step.",
        refute="Count the targets that are not ignore_index in each micro-batch: equal numbers refute it.",
    )


RULE = Rule(kind="token_mean_of_means", check=check, since=_STEPS)
