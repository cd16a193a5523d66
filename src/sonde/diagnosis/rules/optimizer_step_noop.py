"""Steps that change nothing, though there are gradients and a learning rate."""

from __future__ import annotations

from typing import Final

import numpy as np

from sonde import measures, schema
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.ownership import by_number, few, held, is_adaptive, need_optimizers, recent_rates
from sonde.diagnosis.panel import Panel
from sonde.diagnosis.rule import Rule, above, fact
from sonde.facts import OptimizerFacts
from sonde.records import Finding

RECENT: Final = 8
# Their step may end where it began: a line search that finds nothing better.
_SEARCHING: Final = ("LBFGS",)
_COARSE: Final = ("bfloat16", "float16", "float8")


def check(case: Case) -> Finding | None:
    """Find weights that are bitwise the same after each of the last steps of their optimizer."""
    optimizers = need_optimizers(case)
    updates, gradients = case.panel("update", last=RECENT), case.panel("gradient", last=RECENT)
    if not updates.sites or not gradients.sites:
        raise NotMeasured("updates and gradients")
    stuck = _stuck(case, updates, gradients)
    if not stuck:
        return None
    rates, sizes = recent_rates(case, int(thresholds.NOOP_STEPS.value)), _sizes(case)
    for optimizer in optimizers:
        adaptive = is_adaptive(optimizer)
        mine = [
            name
            for name in held(optimizer)
            if name in stuck
            and case.parameters[name].dtype not in _COARSE
            and _would_show(rates.get(name), 1.0 if adaptive else stuck[name], sizes.get(name))
        ]
        if mine and optimizer.kind not in _SEARCHING:
            return _finding(case, optimizer, mine)
    return None


def _stuck(case: Case, updates: Panel, gradients: Panel) -> dict[str, float]:
    """Return by parameter the largest gradient of the last steps, where none of them changed it."""
    steps = int(thresholds.NOOP_STEPS.value)
    skipped = np.isin(updates.steps, case.history.skipped_steps())
    stepped = updates.read & ~skipped[:, None]
    # Of each parameter, the last few steps of its own optimizer.
    last = stepped & (np.cumsum(stepped[::-1], axis=0)[::-1] <= steps)
    unchanged = updates.column(schema.ZERO) == updates.column(schema.COUNT)
    still = (last.sum(axis=0) == steps) & ~(last & ~unchanged).any(axis=0)
    places = {name: at for at, name in enumerate(gradients.names)} if still.any() else {}
    chosen = [at for at in np.flatnonzero(still).tolist() if updates.sites[at].name in places]
    if not chosen:
        return {}
    names = [updates.sites[at].name for at in chosen]
    rows = gradients.rows[:, [places[name] for name in names]]
    pulled = (rows[..., schema.SEEN] > 0) & (measures.norm(rows) > 0) & (measures.nonfinite(rows) == 0)
    always = ~(last[:, chosen] & ~pulled).any(axis=0)
    largest = np.nanmax(np.where(last[:, chosen] & pulled, measures.abs_max(rows), 0.0), axis=0)
    return {name: float(most) for name, most, found in zip(names, largest, always, strict=True) if found}


def _sizes(case: Case) -> dict[str, float]:
    """Return by parameter the largest magnitude of its last reading."""
    panel = case.panel("parameter", last=RECENT)
    largest = panel.stat("abs_max")
    at = np.where(panel.read, np.arange(len(panel))[:, None], -1).max(axis=0, initial=-1)
    return {name: float(largest[at[i], i]) for i, name in enumerate(panel.names) if at[i] >= 0}


def _would_show(rate: float | None, pull: float, size: float | None) -> bool:
    """Say whether a step of the present length would show in the weight's own precision."""
    return rate is not None and size is not None and rate * pull > thresholds.NOOP_RELATIVE_STEP.value * size


def _finding(case: Case, optimizer: OptimizerFacts, names: list[str]) -> Finding:
    rates = recent_rates(case, 1)
    return RULE.finding(
        case,
        "critical" if len(names) == len(held(optimizer)) else "warning",
        0.97,
        sites=(optimizer.name, *names),
        step=max(1, case.step - int(thresholds.NOOP_STEPS.value) + 1),
        evidence=(
            above("steps in a row that left every element as it was", thresholds.NOOP_STEPS.value, 3),
            fact("learning rate", rates.get(names[0], float("nan"))),
            fact("parameters", len(names), f"{names[0]}:update norm"),
        ),
        cause=f"{optimizer.name} steps with gradients and a learning rate of {rates.get(names[0], 0):g}, but "
        f"{few(names)} {by_number(names, 'stays', 'stay')} the same to the last bit.",
        fix="See that step() writes to the model's own tensors (p.add_(...), not p = p + ...) and that no hook or "
        "wrapper holds the update back; update torch if the device's kernel is at fault.",
        refute="Copy one of them, call optimizer.step(), and compare: a difference refutes it.",
    )


RULE = Rule(kind="optimizer_step_noop", check=check, since=3)
