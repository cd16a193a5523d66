"""A loss that swings from step to step."""

from __future__ import annotations

import numpy as np

from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.rule import Rule, above, below
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find a loss that does not fall any more and swings by a large part of its level, up and down in turns."""
    found = case.loss()
    if found is None:
        raise NotMeasured("the loss")
    learning, losses = case.learning, found[1][-64:]
    if learning.state in ("unknown", "broken") or len(losses) < 40 or learning.recent <= 0.2 * learning.initial:
        return None
    changes = np.diff(losses)
    level = float(np.median(np.abs(losses)))
    swing = float(np.median(np.abs(changes))) / level if level > 0 else 0.0
    turns = float((np.sign(changes[1:]) != np.sign(changes[:-1])).mean())
    falling = np.median(losses[-20:]) < 0.9 * np.median(losses[:20])
    if swing < thresholds.OSCILLATION.value or turns < 0.5 or falling:
        return None
    return RULE.finding(
        case,
        "info",
        0.65,
        sites=("(loop)",),
        step=int(found[0][-64:][0]),
        evidence=(
            above(
                "swing from step to step over the level of the loss", swing, thresholds.OSCILLATION, "loss:scalar mean"
            ),
            below("level of the last losses over the first", learning.recent / learning.initial, 10),
        ),
        cause="The loss swings up and down without getting better.",
        fix="Lower the learning rate or the momentum, or use larger batches.",
        refute="Average the loss over an epoch: if the averages fall, the swings are only noise between batches.",
    )


RULE = Rule(kind="loss_oscillation", check=check, since=40)
