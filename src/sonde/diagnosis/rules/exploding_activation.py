"""Outputs of layers that grow and grow."""

from __future__ import annotations

import numpy as np

from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.outlook import gravity
from sonde.diagnosis.rule import Rule, above
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find outputs that are large, many times what they were at first, and larger than before at the last looks."""
    now, then = case.panel("output"), case.first_panel("output")
    if not now.sites:
        raise NotMeasured("outputs")
    largest = now.stat("abs_max")
    start = dict(zip(then.names, _typical(then.stat("abs_max")[:5]), strict=True))
    recent = np.nan_to_num(largest[-5:]).min(axis=0)
    grown = [
        at
        for at, site in enumerate(now.sites)
        if recent[at] >= thresholds.ACTIVATION_HIGH.value
        and recent[at] >= thresholds.ACTIVATION_GROWTH.value * start.get(site.name, np.inf) > 0
    ]
    if not grown or case.num_steps < 10:
        return None
    first = now.sites[grown[0]]
    return RULE.finding(
        case,
        gravity(case),
        0.75,
        sites=tuple(dict.fromkeys(now.sites[at].name for at in grown))[:4],
        step=int(now.steps[-5]) if len(now) >= 5 else case.step,
        evidence=(
            above(
                "largest output of the last steps", recent[grown[0]], thresholds.ACTIVATION_HIGH, f"{first.key} abs_max"
            ),
            above(
                "the same over that of the first steps",
                recent[grown[0]] / start[first.name],
                thresholds.ACTIVATION_GROWTH,
            ),
        ),
        cause=f"Activations explode: the outputs of {first.name} have grown to {recent[grown[0]]:.3g}.",
        fix="Lower the learning rate, add a norm before the layer, or add weight decay.",
        refute="Plot its abs_max over the run: if it has stopped growing, it is only large.",
    )


def _typical(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> list[float]:
    known = np.where(np.isfinite(values), values, 0.0).max(axis=0)
    return [float(value) if value > 0 else float("inf") for value in known]


RULE = Rule(kind="exploding_activation", check=check, since=10)
