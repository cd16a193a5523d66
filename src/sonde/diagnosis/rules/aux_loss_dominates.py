"""A loss of which something else than what should be learnt is nearly all."""

from __future__ import annotations

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.learning import judge
from sonde.diagnosis.outlook import chance_loss
from sonde.diagnosis.root import root_ratios
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding

_FIRST = 3
_STEPS = 60
_CONSTANT = 1.5
_GUESSING = 0.95  # of the loss of a guess that knows nothing of its input


def check(case: Case) -> Finding | None:
    """Find a total that is many times the loss it holds, falls, and leaves that loss at that of a guess."""
    ratios, loss = root_ratios(case), case.curve(f"{vitals.LOSS}:output")
    if ratios is None or loss is None:
        raise NotMeasured("what backward() was called on, beside a loss function of torch")
    if len(ratios) < 2 * _FIRST or len(loss[1]) < _STEPS:
        return None
    first, now = float(ratios[:_FIRST].min()), float(ratios[-1])
    # A plain factor before the loss stays what it is; a term of its own changes by itself.
    if first < thresholds.AUX_SHARE.value or now > first / _CONSTANT:
        return None
    learning, chance = judge(loss[1]), chance_loss(case)
    if not learning.failed and (chance is None or learning.recent < _GUESSING * chance):
        return None
    kind = next((each.kind for each in case.facts.losses), "loss")
    return RULE.finding(
        case,
        "warning",
        0.85,
        sites=(vitals.LOSS,),
        step=1,
        evidence=(
            above("what was differentiated over the loss, lowest of the first steps", first, thresholds.AUX_SHARE),
            fact("the same now", now, "(loop):vital.root mean"),
            fact(f"{kind} of the first steps", learning.initial, f"{vitals.LOSS}:output mean"),
            fact(f"{kind} now", learning.recent),
        ),
        cause=f"What is trained is mostly not the {kind}: at the start the total was {first:.0f} times as large. "
        f"Training has brought the rest down, and the {kind} is no better than a guess that ignores the input.",
        fix="Give the added term (KL, penalty, balance) a smaller weight, or reduce it as the loss is reduced: a mean "
        "beside a mean, not a sum; or raise its weight slowly.",
        refute="Train 100 steps without the added term: if the loss does not fall then either, it is not this.",
    )


RULE = Rule(kind="aux_loss_dominates", check=check, since=_STEPS)
