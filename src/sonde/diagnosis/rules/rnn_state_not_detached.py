"""A hidden state that is carried into the next batch with its graph."""

from __future__ import annotations

from typing import Final

from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Rule, fact
from sonde.records import Finding

_RECURRENT: Final = ("RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell")


def check(case: Case) -> Finding | None:
    """Find the error of a second backward through the same graph, in a model with a recurrent layer."""
    recurrent = [module.name for module in case.facts.modules if module.kind in _RECURRENT]
    said = [
        event
        for event in case.events
        if event.event_type == "exception" and "backward through the graph a second time" in event.message
    ]
    if not recurrent or not said:
        return None
    return RULE.finding(
        case,
        "critical",
        0.85,
        sites=tuple(recurrent[:4]),
        step=case.step if said[0].step is None else said[0].step,
        evidence=(fact("errors of a second backward through the same graph", len(said)),),
        cause="The hidden state of the batch before still carries its graph, which the backward pass has freed.",
        fix="Detach it between batches (hidden = hidden.detach(), for an LSTM both parts), or start each from zeros.",
        refute="Start every batch from a state of zeros: if the error remains, another tensor carries the graph.",
    )


RULE = Rule(kind="rnn_state_not_detached", check=check, since=0)
