"""Layers that run in float32 though autocast is on."""

from __future__ import annotations

from sonde.diagnosis.case import Case
from sonde.diagnosis.ownership import by_number, few
from sonde.diagnosis.rule import Rule, fact
from sonde.records import Finding

_LOWERED = ("Linear", "Conv1d", "Conv2d", "Conv3d")


def check(case: Case) -> Finding | None:
    """Find layers that autocast would run in low precision and whose output is float32 all the same."""
    if not case.need_facts().autocast:
        return None
    layers = [site for site in case.sites("output") if site.kind in _LOWERED and site.same_as is None]
    full = [site.name for site in layers if site.dtype == "float32"]
    if not full or len(full) == len(layers):
        return None
    return RULE.finding(
        case,
        "info",
        0.8,
        sites=tuple(dict.fromkeys(full)),
        step=1,
        evidence=(fact("layers with float32 outputs", len(set(full))), fact("layers of such classes", len(layers))),
        cause=f"Autocast to {case.facts.autocast} is on, but {few(full)} "
        + by_number(full, "returns float32: it runs outside of it.", "return float32: they run outside of it."),
        fix="Move the whole forward pass and the loss into the autocast block, unless they are kept out on purpose.",
        refute="Print the dtype of their output inside the block.",
    )


RULE = Rule(kind="autocast_missing", check=check, since=2)
