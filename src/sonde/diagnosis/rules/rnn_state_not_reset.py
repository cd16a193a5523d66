"""A recurrent state that is handed on between samples that have nothing to do with each other."""

from __future__ import annotations

from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.ownership import few
from sonde.diagnosis.rule import Rule, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find recurrent modules that begin with the state of the step before, though the loader shuffles."""
    carried = case.facts.carried
    if not carried:
        return None
    loader = case.facts.loader
    if loader is None or "shuffle" not in loader.settings:
        raise NotMeasured("whether the loader shuffles")
    if loader.settings["shuffle"] is not True:
        return None  # pieces of one long text in their order: the state belongs to them
    return RULE.finding(
        case,
        "warning",
        0.9,
        sites=(*carried, "loader"),
        step=2,
        evidence=(
            fact("recurrent modules that begin with the state of the step before", len(carried)),
            fact("the loader shuffles", 1),
        ),
        cause=f"{few(carried)} begins each batch with the state that the batch before ended with, but the loader "
        "shuffles: that state belongs to other samples.",
        fix="Begin each batch with no state (hand in None or zeros), or read the samples in order with shuffle=False.",
        refute="If sample i of each batch goes on where sample i of the batch before ended, it is wrong.",
    )


RULE = Rule(kind="rnn_state_not_reset", check=check, since=2)
