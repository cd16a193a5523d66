"""A loss that ends high."""

from __future__ import annotations

from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find a run that is over and has learnt only a little."""
    if case.loss() is None:
        raise NotMeasured("the loss")
    learning = case.learning
    if learning.state != "improving" or learning.points < thresholds.NOT_LEARNING_STEPS.value:
        return None
    left = learning.recent / learning.initial if learning.initial > 0 else 0.0
    if left < thresholds.UNDERFIT.value:
        return None
    return RULE.finding(
        case,
        "info",
        0.65,
        sites=("(loop)",),
        evidence=(
            above("part of the first loss that is left", left, thresholds.UNDERFIT, "loss:scalar mean"),
            fact("losses", learning.points),
        ),
        cause="The run ended with most of its loss left: the model is too small, the training too short, or too slow.",
        fix="Train longer, raise the learning rate, or widen the model.",
        refute="Compare with the best loss that is possible: labels may be noisy.",
    )


RULE = Rule(kind="underfitting", check=check, since=1, final=True)
