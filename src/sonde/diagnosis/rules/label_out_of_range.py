"""Labels that are no class of the model."""

from __future__ import annotations

import re
from typing import Final

from sonde import vitals
from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Rule, above, below, fact
from sonde.records import Evidence, Finding

_SAID: Final = re.compile(r"Target (-?\d+) is out of bounds|t >= 0 && t < n_classes")


def check(case: Case) -> Finding | None:
    """Find class labels below 0 or beyond the last class, or the error that they raise."""
    evidence = _from_error(case) or _from_values(case)
    if evidence is None:
        return None
    return RULE.finding(
        case,
        "critical",
        0.97,
        sites=("loss_fn", "loader"),
        evidence=evidence,
        cause="A label is no class of the model: the output layer has too few classes, or labels do not begin at 0.",
        fix="Make the last layer as wide as the highest label plus one, or map labels to 0 ... C-1.",
        refute="Print the smallest and the largest label and the width of the output: a fit refutes it.",
    )


def _from_error(case: Case) -> tuple[Evidence, ...] | None:
    for event in case.events:
        match = _SAID.search(event.message) if event.event_type == "exception" else None
        if match is not None:
            label = float(match.group(1)) if match.group(1) else float("nan")
            loss = case.loss_facts("cross_entropy", "nll_loss")
            classes = float("nan") if loss is None or not loss.classes else float(loss.classes)
            return (fact("label", label), fact("classes of the output, where known", classes))
    return None


def _from_values(case: Case) -> tuple[Evidence, ...] | None:
    loss = case.loss_facts("cross_entropy", "nll_loss")
    target = case.track(f"{vitals.LOSS}:input.target")
    if loss is None or target is None or not loss.classes or "int" not in target.site.dtype:
        return None
    ignored = loss.settings.get("ignore_index", -100)
    low, high = float(target.stat("min").min()), float(target.stat("max").max())
    if low < 0 and low != ignored:
        return (below("smallest label", low, -1, f"{target.key} min"), fact("classes", loss.classes))
    if high >= loss.classes and high != ignored:
        return (above("largest label", high, loss.classes, f"{target.key} max"), fact("classes", loss.classes))
    return None


RULE = Rule(kind="label_out_of_range", check=check, since=0)
