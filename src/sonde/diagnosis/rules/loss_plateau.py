"""A loss that has stopped falling early."""

from __future__ import annotations

import numpy as np

from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find a loss that fell at first, not far, and has stood still since."""
    found = case.loss()
    if found is None:
        raise NotMeasured("the loss")
    learning, (steps, losses) = case.learning, found
    wait = int(thresholds.PLATEAU_STEPS.value)
    if learning.state != "improving" or len(losses) < 2 * wait or learning.recent < 0.5 * learning.initial:
        return None
    older, newer = losses[-wait : -wait // 2], losses[-wait // 2 :]
    progress = float(np.median(older) - np.median(newer))
    if progress > max(0.01 * abs(learning.initial), learning.noise / 3):
        return None
    return RULE.finding(
        case,
        "info",
        0.7,
        sites=("(loop)",),
        step=int(steps[-wait]),
        evidence=(
            above("losses without progress", wait, thresholds.PLATEAU_STEPS, "loss:scalar mean"),
            fact("level now over the first", learning.recent / learning.initial),
        ),
        cause="The loss stands still at a high level.",
        fix="Change the learning rate (both ways), widen the model, or look at the samples with the highest loss.",
        refute="Train twice as long: if it falls again, it was a passing plateau.",
    )


RULE = Rule(kind="loss_plateau", check=check, since=2 * int(thresholds.PLATEAU_STEPS.value))
