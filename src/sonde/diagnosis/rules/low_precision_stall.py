"""Steps that are too short for the precision of the weights."""

from __future__ import annotations

import numpy as np

from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.outlook import is_learning_well
from sonde.diagnosis.ownership import by_number, few, recent_rates
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding

_COARSE = ("bfloat16", "float16")


def check(case: Case) -> Finding | None:
    """Find weights in bfloat16 or float16 of which hardly an element changes in a step, for many steps."""
    panel = case.panel("update", last=int(thresholds.STALL_STEPS.value))
    rates = recent_rates(case, int(thresholds.STALL_STEPS.value))
    chosen = [
        at
        for at, site in enumerate(panel.sites)
        if site.dtype in _COARSE
        and len(site.shape) >= 2
        and "Embedding" not in site.kind
        and rates.get(site.name, 0) > 0
    ]
    if not chosen:
        return None
    panel = panel.pick(chosen)
    gradients = case.panel("gradient", last=int(thresholds.STALL_STEPS.value))
    alive = np.any(gradients.stat("abs_max") > 0, axis=0)
    pulled = {name for at, name in enumerate(gradients.names) if alive[at]}
    zeros = np.where(panel.read, panel.stat("zero_share"), np.nan)
    known = panel.read.sum(axis=0) >= thresholds.STALL_STEPS.value
    stuck = [
        (panel.names[at], float(np.nanmedian(zeros[:, at])))
        for at in np.flatnonzero(known)
        if np.nanmedian(zeros[:, at]) >= thresholds.STALL_SHARE.value and panel.names[at] in pulled
    ]
    if len(stuck) * 2 < len(chosen) or not stuck:
        return None
    names = [name for name, _ in stuck]
    if _is_passing(case, names[0]):
        return None
    learning = is_learning_well(case)
    return RULE.finding(
        case,
        "info" if learning else "warning",
        0.92,
        sites=tuple(names),
        step=int(panel.steps[0]),
        evidence=(
            above(
                "share of elements a step leaves as they were",
                stuck[0][1],
                thresholds.STALL_SHARE,
                f"{names[0]}:update zero_share",
            ),
            above("steps in a row", thresholds.STALL_STEPS.value, thresholds.STALL_STEPS),
            fact("learning rate", rates[names[0]]),
        ),
        cause=f"Steps are too short for the precision of {few(names)}: {stuck[0][1]:.0%} of "
        f"{by_number(names, 'its', 'their')} elements round back "
        "to what they were.",
        fix="Keep the weights in float32 and use autocast for the passes, or an optimizer with float32 master weights "
        "or stochastic rounding.",
        refute="Take the same step on a float32 copy: if as many elements stay the same, the gradient is at fault.",
    )


def _is_passing(case: Case, name: str) -> bool:
    """Say whether the steps are short because the schedule is just starting or ending."""
    for optimizer in case.facts.optimizers:
        for index, group in enumerate(optimizer.groups):
            curve = case.learning_rate(optimizer.name, index)
            if name in group.parameters and curve is not None:
                recent = curve[1][-int(thresholds.STALL_STEPS.value) :]
                return bool(recent[-1] > recent[0] or recent[-1] < 0.3 * curve[1].max())
    return False


RULE = Rule(kind="low_precision_stall", check=check, since=20)
