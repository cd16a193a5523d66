"""A target that takes part in the gradient."""

from __future__ import annotations

from sonde import vitals
from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Rule, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find a loss whose target is data plus a multiple of what the model says, and is differentiated like its input."""
    kind = case.need_facts().bootstrapped
    if not kind:
        return None
    return RULE.finding(
        case,
        "warning",
        0.9,
        sites=(vitals.LOSS, "(loop)"),
        step=1,
        evidence=(fact("sides of the loss that a gradient flows into", 2),),
        cause=f"The target of the loss ({kind}) is made of data and of the model's own output, and the gradient flows "
        "into it as well: instead of the output coming to the target, both meet halfway.",
        fix="Compute the target under torch.no_grad(), or detach() it; usual is a copy of the model for it.",
        refute="If both sides are meant to move, as in residual-gradient methods, this is wrong.",
    )


RULE = Rule(kind="target_not_detached", check=check, since=1)
