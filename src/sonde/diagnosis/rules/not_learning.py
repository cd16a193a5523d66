"""A loss that never fell."""

from __future__ import annotations

from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.outlook import chance_loss, is_better_than_guessing
from sonde.diagnosis.rule import Rule, above, fact
from sonde.diagnosis.targets import targets_move
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find a run whose loss is where it began; some tasks have a plateau, so it is grave only when the run is over."""
    if case.loss() is None:
        raise NotMeasured("the loss")
    learning = case.learning
    if learning.state not in ("flat", "worse") or learning.points < thresholds.NOT_LEARNING_STEPS.value:
        return None
    chance = chance_loss(case)
    if learning.margin > thresholds.NOISY_LOSS.value * abs(learning.initial):
        return None  # even a good part of the loss could have gone without being noticed
    if learning.initial == 0 or (chance is not None and learning.initial < 0.3 * chance):
        return None  # it began well trained
    if is_better_than_guessing(case, thresholds.LEARNT.value):
        return None  # there is little to learn, and it was learnt
    return RULE.finding(
        case,
        "warning" if case.final and not targets_move(case) else "info",
        0.8,
        sites=("(loop)",),
        step=1,
        evidence=(
            above("losses without progress", learning.points, thresholds.NOT_LEARNING_STEPS, "loss:scalar mean"),
            fact("level of the first losses", learning.initial),
            fact("level of the last losses", learning.recent),
        ),
        cause="The model has not learnt anything: the loss is where it began, and no cause was found.",
        fix="Run sonde.checkup: can the model learn one batch by heart? If not, look at the model and the loss; if so, "
        "at the data and the learning rate.",
        refute="Train on: if the loss falls later, it was a plateau.",
    )


RULE = Rule(kind="not_learning", check=check, since=int(thresholds.NOT_LEARNING_STEPS.value))
