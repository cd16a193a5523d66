"""Does a step look like the first of a fresh optimizer? Told from its update alone.

Adam's first step moves every element by just the learning rate, whatever its gradient. Later steps do not, unless the
state has been lost.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sonde import measures, schema
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.panel import Panel
from sonde.diagnosis.weights import is_weight

_LIKE_ADAM = ("Adam", "AdamW", "Adamax", "NAdam")


def fresh_steps(case: Case) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the remembered steps of Adam-like optimizers, and whether each looks like the first.

    Raises:
        NotMeasured: Updates are not recorded, or the optimizer is not of this family.

    """
    names = {
        name: (optimizer.name, index)
        for optimizer in case.need_facts().optimizers
        if optimizer.kind in _LIKE_ADAM
        for index, group in enumerate(optimizer.groups)
        for name in group.parameters
    }
    if not names:
        raise NotMeasured("updates of an optimizer of Adam's family")
    parts = [_look(case, panel, names) for panel in (case.first_panel("update"), case.panel("update"))]
    if not any(len(steps) for steps, _ in parts):
        raise NotMeasured("updates")
    found: dict[int, bool] = {}
    for steps, fresh in parts:
        found |= dict(zip(steps.tolist(), fresh.tolist(), strict=True))
    ordered = sorted(found)
    return np.array(ordered, np.int64), np.array([found[step] for step in ordered], np.bool_)


def _look(case: Case, panel: Panel, names: dict[str, tuple[str, int]]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    chosen = [at for at, site in enumerate(panel.sites) if is_weight(site) and site.name in names]
    if not chosen:
        return np.zeros(0, np.int64), np.zeros(0, np.bool_)
    panel = panel.pick(chosen)
    rates = np.stack([_rates(case, *names[name], panel.steps) for name in panel.names], axis=1)
    moved = panel.column(schema.COUNT) - panel.column(schema.ZERO)
    with np.errstate(invalid="ignore", divide="ignore"):
        size = measures.norm(panel.rows) / np.sqrt(moved)
        even = (size / measures.abs_max(panel.rows) >= thresholds.FRESH_STEP_EVENNESS.value) & (
            np.abs(size / rates - 1) < 0.1
        )
    read = panel.read & (moved > 0)
    counted = read.sum(axis=1)
    share = np.divide((even & read).sum(axis=1), counted, out=np.zeros(len(panel)), where=counted > 0)
    kept = counted > 0
    return panel.steps[kept], share[kept] >= thresholds.FRESH_STEP_WEIGHTS.value


def _rates(case: Case, optimizer: str, group: int, steps: NDArray[np.int64]) -> NDArray[np.float64]:
    found = case.learning_rate(optimizer, group)
    if found is None:
        return np.full(len(steps), np.nan)
    at = np.clip(np.searchsorted(found[0], steps), 0, len(found[0]) - 1)
    result: NDArray[np.float64] = np.where(found[0][at] == steps, found[1][at], np.nan)
    return result
