"""What `backward()` was called on, compared with what the loss function returned."""

from __future__ import annotations

import numpy as np

from sonde import vitals
from sonde.diagnosis.case import Case
from sonde.diagnosis.track import Values


def root_ratios(case: Case) -> Values | None:
    """Return, for the last steps, the number that was differentiated over the loss; None if it cannot be told.

    1 if `backward()` was called on the loss itself, 1/k if it was divided by k, -1 if its sign was turned. Where one
    step has several losses, or a scaler multiplies them, nothing can be said.
    """
    root = case.vital(vitals.LOOP, vitals.ROOT)
    loss = case.track(f"{vitals.LOSS}:output")
    if (
        root is None
        or loss is None
        or loss.site.kind == "backward"
        or case.track(f"{vitals.LOSS}:output#1") is not None
        or _is_divided_by_hand(case, loss.site.kind)
    ):
        return None
    steps, at, of = np.intersect1d(root.steps, loss.steps, return_indices=True)
    losses, roots = loss.numbers()[of], root.numbers()[at]
    known = np.isfinite(losses) & np.isfinite(roots) & (np.abs(losses) > 1e-12)
    return roots[known] / losses[known] if len(steps) and known.any() else None


def _is_divided_by_hand(case: Case, kind: str) -> bool:
    """Say whether the loss is known only by the number that was differentiated, which is not a plain mean or sum."""
    facts = case.loss_facts(kind)
    if facts is None or facts.settings.get("by_hand") is not True:
        return False
    return facts.settings.get("reduction") not in ("mean", "sum")


def root_ratio(case: Case) -> float | None:
    """Return the middle of `root_ratios`."""
    ratios = root_ratios(case)
    return None if ratios is None else float(np.median(ratios))
