"""A transformer that is thrown off by its first steps."""

from __future__ import annotations

from typing import Final

import numpy as np

from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.outlook import is_failing
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding

_FIRST: Final = 20


def check(case: Case) -> Finding | None:
    """Find attention trained by Adam at full rate from the start, with a loss that first rises and then recovers."""
    found = case.loss()
    rate = case.learning_rate()
    if found is None or rate is None:
        raise NotMeasured("the loss and the learning rate")
    adaptive = any("Adam" in optimizer.kind for optimizer in case.facts.optimizers)
    attends = any("Attention" in module.kind or "Transformer" in module.kind for module in case.facts.modules)
    if not (adaptive and attends) or is_failing(case) or len(found[1]) < 2 * _FIRST:
        return None
    losses, rates = found[1], rate[1]
    highest = float(np.nanmax(losses[1:_FIRST])) / abs(float(losses[0]) or 1.0)
    constant = rates[:_FIRST].max() <= rates[0] * 1.01
    above_start = int((losses[:_FIRST] > losses[0] * 1.1).sum())
    if highest < thresholds.EARLY_RISE.value or not constant or above_start < 3:
        return None
    return RULE.finding(
        case,
        "info",
        0.7,
        sites=("optimizer",),
        step=int(found[0][1]),
        evidence=(
            above("highest of the first losses over the first", highest, thresholds.EARLY_RISE, "loss:scalar mean"),
            fact("steps above the first loss", above_start),
        ),
        cause="There is no warm-up: Adam's first steps at the full rate throw the attention off, and time is lost.",
        fix="Raise the learning rate from 0 over the first hundreds of steps (torch.optim.lr_scheduler.LinearLR).",
        refute="Train 100 steps with a warm-up: if the loss rises at first all the same, it is not the cause.",
    )


RULE = Rule(kind="missing_warmup", check=check, since=2 * _FIRST)
