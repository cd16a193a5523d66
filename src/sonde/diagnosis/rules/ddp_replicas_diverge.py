"""Replicas of a model that are not the same any more."""

from __future__ import annotations

from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.replicas import TOLERANCE
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find parameters that differ between ranks. Only the files of all ranks together can tell."""
    if case.replicas is None:
        raise NotMeasured("parameters of more than one rank")
    if not case.replicas:
        return None
    first = case.replicas[0]
    return RULE.finding(
        case,
        "critical",
        0.97,
        sites=tuple(drift.name for drift in case.replicas[:8]),
        step=first.step,
        evidence=(
            above("difference between ranks, as a part of the weight, when it began", first.first, TOLERANCE),
            above("difference between ranks at the end", first.last, TOLERANCE, f"{first.name}:parameter mean"),
            fact("parameters that differ", len(case.replicas)),
        ),
        cause=f"The replicas drift apart: after step {first.step} {first.name} is not the same on all ranks.",
        fix="Call the DistributedDataParallel wrapper instead of the module inside it, wrap the model after moving it "
        "to its device and dtype, and clip or change gradients on all ranks alike.",
        refute="Gather one parameter from all ranks after a step: equal values refute it.",
    )


RULE = Rule(kind="ddp_replicas_diverge", check=check)
