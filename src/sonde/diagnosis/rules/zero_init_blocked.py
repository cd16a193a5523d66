"""Zeros that keep each other from ever getting a gradient."""

from __future__ import annotations

import numpy as np

from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find weights that began at zero and have had nothing but zero gradients, two of them or more."""
    case.need_facts()
    zero = {each.name for each in case.facts.parameters if each.zero and each.trainable and len(each.shape) >= 2}
    if len(zero) < 2:
        return None  # one factor of zero is how LoRA and residual branches begin
    gradients, parameters = case.panel("gradient"), case.panel("parameter")
    chosen = [at for at, site in enumerate(gradients.sites) if site.name in zero]
    if len(chosen) < 2:
        return None
    largest = gradients.pick(chosen).stat("abs_max")
    sizes = np.nan_to_num(parameters.stat("abs_max")).max(axis=0)
    still = {site.name for at, site in enumerate(parameters.sites) if site.name in zero and sizes[at] == 0}
    blocked = [
        gradients.sites[index].name
        for at, index in enumerate(chosen)
        if (known := largest[np.isfinite(largest[:, at]), at]).size >= 3
        and known.max() == 0
        and gradients.sites[index].name in still
    ]
    if len(blocked) < 2:
        return None
    return RULE.finding(
        case,
        "critical" if case.learning.failed else "warning",
        0.95,
        sites=tuple(blocked[:6]),
        step=int(case.history.first_step or 0),
        evidence=(
            above("weights at zero whose gradients were always zero", len(blocked), 2),
            fact("largest gradient among them", 0.0, f"{blocked[0]}:gradient abs_max"),
        ),
        cause=f"{blocked[0]} and {blocked[1]} are both zero: the gradient of each is multiplied by the other, so that "
        "neither ever moves.",
        fix="Initialise at least one of them at random; only one factor of a product may begin at zero.",
        refute="Set one of them to small random values: if the other's gradient stays zero, it is not this.",
    )


RULE = Rule(kind="zero_init_blocked", check=check, since=3)
