"""Parameters that an optimizer holds more than once."""

from __future__ import annotations

from sonde.diagnosis.case import Case
from sonde.diagnosis.ownership import by_number, few
from sonde.diagnosis.rule import Rule, above
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find an optimizer with the same parameter twice: each of its steps moves it twice."""
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
    return None


RULE = Rule(kind="duplicate_param_in_groups", check=check, since=0)
