"""Parameters that one optimizer holds twice, or that two hold which step together."""

from __future__ import annotations

from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.ownership import by_number, few
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find a parameter that is moved twice with one gradient: by one optimizer that has it twice, or by two."""
    for optimizer in case.need_facts().optimizers:
        if optimizer.duplicates:
            return RULE.finding(
                case,
                "warning",
                0.98,
                sites=(optimizer.name, *optimizer.duplicates),
                step=0,
                evidence=(above("parameters held more than once", len(optimizer.duplicates), 1),),
                cause=f"{optimizer.name} holds {few(optimizer.duplicates)} more than once: each step moves "
                + by_number(optimizer.duplicates, "it twice.", "them twice."),
                fix="Make the list of parameters from a dict by id, or from model.parameters(), which has each once; "
                "tied weights have two names and are one parameter.",
                refute="If len(ids) == len(set(ids)) for the ids of all parameters in optimizer.param_groups, it is "
                "wrong.",
            )
    return _shared(case)


def _shared(case: Case) -> Finding | None:
    """Find parameters of two optimizers that both step after each backward pass."""
    shared = [each for each in case.facts.parameters if len(each.owners) > 1 and each.trainable]
    if not shared or case.num_steps < thresholds.DOUBLE_STEPS.value or case.take_turns():
        return None
    names, owners = [each.name for each in shared], shared[0].owners
    return RULE.finding(
        case,
        "warning",
        0.95,
        sites=(*owners, *names),
        step=1,
        evidence=(
            above("parameters that more than one optimizer holds", len(names), 1),
            fact("optimizers that step after one backward pass", len(owners)),
        ),
        cause=f"{few(owners)} both hold {few(names)}, and both step after the same backward pass: it is moved twice.",
        fix="Give each optimizer its own part of the model: encoder.parameters() to one, decoder.parameters() to the "
        "other.",
        refute="If the two never step with the same gradients, as when they take turns, this is wrong.",
    )


RULE = Rule(kind="duplicate_param_in_groups", check=check, since=0)
