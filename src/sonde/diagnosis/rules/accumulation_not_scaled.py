"""Gradients that are accumulated without dividing the loss."""

from __future__ import annotations

import numpy as np

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.ownership import is_adaptive, need_optimizers
from sonde.diagnosis.root import root_ratio
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find several passes and backward passes per step with a loss that is differentiated as it is.

    With several optimizers, parts of a game are added up on purpose; a sum that is asked for needs no division. An
    optimizer that searches along a line runs as many passes as it likes and adds nothing up.
    """
    optimizers = need_optimizers(case)
    if any(optimizer.kind == "LBFGS" for optimizer in optimizers):
        return None
    backwards = case.need_vital(vitals.LOOP, vitals.BACKWARDS).last(8)
    forwards = case.need_vital(vitals.LOOP, vitals.FORWARDS).last(8)
    times = float(np.median(backwards.numbers()))
    same = len(forwards) == len(backwards) and bool((forwards.numbers() == backwards.numbers()).all())
    if times < 2 or len(backwards) < thresholds.LOSS_LOOKS.value or not same or len(optimizers) > 1:
        return None
    ratio = root_ratio(case)
    if ratio is None:
        raise NotMeasured("(loop):vital.root and loss_fn:output")
    loss = case.loss_facts()
    kinds = {each.kind for each in case.facts.losses}
    is_mean = loss is not None and len(kinds) == 1 and loss.settings.get("reduction", "mean") == "mean"
    if not is_mean or abs(ratio) < thresholds.ROOT_RATIO.value:
        return None
    # Two passes per step may be one that looks ahead, as sharpness-aware training does, which adds nothing up.
    harmless = is_adaptive(optimizers[0]) or times < 3
    return RULE.finding(
        case,
        "info" if harmless else "warning",
        0.95,
        sites=(vitals.LOSS,),
        step=int(backwards.steps[0]) if case.step > 60 else 1,
        evidence=(
            above("backward passes per step", times, 2, f"{backwards.key} mean"),
            above("what backward() was called on, over the loss", ratio, thresholds.ROOT_RATIO),
            fact("what it would be if divided", 1 / times),
        ),
        cause=f"Each step adds up {times:g} backward passes of the whole loss: gradients are {times:g} times as large "
        "as those of one batch of that size.",
        fix=f"Call (loss / {times:g}).backward(), or divide the learning rate by {times:g}."
        + (" Here the scale of gradients matters little." if harmless else ""),
        refute="Compare the gradient norm of a step with that of one pass over the same samples: equal norms refute "
        "it.",
    )


RULE = Rule(kind="accumulation_not_scaled", check=check, since=2)
