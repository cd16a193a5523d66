"""A loss that gets worse and worse."""

from __future__ import annotations

from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured, run_length
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find a loss that has left its best level for long; `nan_in_loss` is about one that is NaN or infinite."""
    found = case.loss()
    if found is None:
        raise NotMeasured("the loss")
    steps, losses = found
    learning = case.learning
    if learning.state in ("unknown", "broken"):
        return None
    best = learning.best
    limit = best + (thresholds.DIVERGED.value - 1) * max(abs(best), abs(learning.initial))
    away = run_length(losses > limit)
    if away < thresholds.DIVERGED_STEPS.value:
        return None
    evidence = (
        above("losses in a row far above the best", away, thresholds.DIVERGED_STEPS, "loss:scalar mean"),
        fact("best level", best),
        fact("level now", learning.recent),
    )
    return RULE.finding(
        case,
        "warning",
        0.9,
        sites=("(loop)",),
        step=int(steps[-away]),
        evidence=evidence,
        cause="The loss diverges: it is far above where it has been before.",
        fix="Lower the learning rate, clip gradients, and look at the batch at which it began.",
        refute="Go on from a checkpoint before it began: if the loss keeps falling, it was a passing disturbance.",
    )


RULE = Rule(kind="loss_divergence", check=check, since=10)
