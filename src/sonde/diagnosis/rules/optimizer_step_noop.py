"""Steps that change nothing, though there are gradients and a learning rate."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde import measures, schema
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.ownership import few, held, is_adaptive, need_optimizers, recent_rates
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
    for optimizer in optimizers:
        mine = [name for name in held(optimizer) if _counts(case, optimizer, name, stuck)]
        if mine and optimizer.kind not in _SEARCHING:
            return _finding(case, optimizer, mine)
    return None


def _stuck(case: Case, updates: Panel, gradients: Panel) -> dict[str, float]:
    """Return by parameter the largest gradient of the last steps, where none of them changed it."""
    skipped = np.isin(updates.steps, case.history.skipped_steps())
    unchanged = updates.read & (updates.column(schema.ZERO) == updates.column(schema.COUNT))
    candidates = np.flatnonzero(unchanged.sum(axis=0) >= thresholds.NOOP_STEPS.value).tolist()
    places = {name: at for at, name in enumerate(gradients.names)} if candidates else {}
    found = {}
    for at in candidates:
        name = updates.sites[at].name
        if name not in places:
            continue
        row, grad = updates.rows[:, at], gradients.rows[:, places[name]]
        stepped = np.flatnonzero((row[:, schema.SEEN] > 0) & ~skipped)[-int(thresholds.NOOP_STEPS.value) :]
        if len(stepped) == thresholds.NOOP_STEPS.value and _is_still(row[stepped], grad[stepped]):
            found[name] = float(measures.abs_max(grad[stepped]).max())
    return found


def _is_still(updates: NDArray[np.float64], gradients: NDArray[np.float64]) -> bool:
    unchanged = updates[:, schema.ZERO] == updates[:, schema.COUNT]
    pulled = (gradients[:, schema.SEEN] > 0) & (measures.norm(gradients) > 0) & (measures.nonfinite(gradients) == 0)
    return bool(unchanged.all() and pulled.all())


def _counts(case: Case, optimizer: OptimizerFacts, name: str, stuck: dict[str, float]) -> bool:
    """Say whether a step of the present length would show in the weight's own precision."""
    if name not in stuck or case.parameters[name].dtype in _COARSE:
        return False
    rate = recent_rates(case, int(thresholds.NOOP_STEPS.value)).get(name)
    weight = case.track(f"{name}:parameter")
    if rate is None or weight is None:
        return False
    length = rate if is_adaptive(optimizer) else rate * stuck[name]
    return length > thresholds.NOOP_RELATIVE_STEP.value * float(measures.abs_max(weight.rows[-1]))


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
        f"{few(names)} stay the same to the last bit.",
        fix="See that step() writes to the model's own tensors (p.add_(...), not p = p + ...) and that no hook or "
        "wrapper holds the update back; update torch if the device's kernel is at fault.",
        refute="Copy one of them, call optimizer.step(), and compare: a difference refutes it.",
    )


RULE = Rule(kind="optimizer_step_noop", check=check, since=3)
