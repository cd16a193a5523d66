"""A loss that is summed over the batch where a mean was meant."""

from __future__ import annotations

import numpy as np

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.ownership import is_adaptive, need_optimizers
from sonde.diagnosis.root import root_ratio
from sonde.diagnosis.rule import Rule, above, fact
from sonde.diagnosis.seen_loss import SeenLoss, seen_losses
from sonde.diagnosis.weights import first_weights
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find a summed loss that nobody divides, and steps that are too long for it.

    Where the optimizer's step does not grow with the gradient, or the sum is divided later, a sum does no harm.
    """
    summed = [loss for loss in seen_losses(case) if _is_sum(loss)]
    if not summed or all(is_adaptive(optimizer) for optimizer in need_optimizers(case)):
        return None
    loss = summed[0]
    batch = loss.facts.input_shape[0] if loss.facts is not None and loss.facts.input_shape else 1
    ratio = root_ratio(case)
    if batch < 2 or (ratio is not None and ratio < 0.5):
        return None
    pace = first_weights(case).pace()
    if not len(pace) or float(np.max(pace[:10])) < thresholds.SUM_UPDATE_RATIO.value:
        return None
    output = loss.output
    return RULE.finding(
        case,
        "warning",
        0.93,
        sites=(vitals.LOSS,),
        step=1,
        evidence=(
            above("largest early step as a part of the weights", float(np.max(pace[:10])), thresholds.SUM_UPDATE_RATIO),
            above("samples that are added up", batch, 2),
            fact("loss at the start", float("nan") if output is None else float(output.numbers()[0])),
        ),
        cause=f"{loss.kind} adds up the {batch} samples of a batch instead of averaging them: gradients, and with them "
        f"steps, are {batch} times as large.",
        fix="Use reduction='mean', or divide the learning rate by the batch size.",
        refute="Train with half the batch size: if steps keep their length, the sum is divided somewhere.",
    )


def _is_sum(loss: SeenLoss) -> bool:
    return loss.facts is not None and loss.facts.settings.get("reduction") == "sum"


RULE = Rule(kind="wrong_loss_reduction", check=check, since=3)
