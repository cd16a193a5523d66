"""The units of a weight: how large each is, which are dead, which are copies of another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from sonde.debug.numbers import as_array
from sonde.errors import OptionError

DEAD_SHARE: Final = 1e-6
"""A unit whose norm is below this part of the median one does not contribute."""
TWIN_COSINE: Final = 0.999
_MAX_UNITS: Final = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightAnalysis:
    """A weight by its units (rows)."""

    name: str
    units: int
    mean: float
    std: float
    smallest_norm: float
    median_norm: float
    largest_norm: float
    dead: tuple[int, ...]
    twins: tuple[tuple[int, int], ...] | None
    """Pairs of units that point the same way, at most 100; None if there are too many units to compare all pairs."""
    effective_rank: float
    """How many directions the rows really span: the exponential of the entropy of the singular values."""


def analyze_weights(weight: Any, name: str = "weight") -> WeightAnalysis:
    """Analyse a weight `[units, ...]`.

    Raises:
        OptionError: It has fewer than two dimensions, or elements that are not finite.

    """
    array = as_array(weight, name).astype(np.float64)
    if array.ndim < 2 or not array.size:
        raise OptionError(f"{name}: units are the rows of a weight with two dimensions or more; got {array.shape}.")
    if not np.isfinite(array).all():
        raise OptionError(f"{name} has elements that are not finite; inspect_tensor tells how many.")
    rows = array.reshape(len(array), -1)
    norms = np.linalg.norm(rows, axis=1)
    median = float(np.median(norms))
    return WeightAnalysis(
        name=name,
        units=len(rows),
        mean=float(rows.mean()),
        std=float(rows.std(ddof=1)) if rows.size > 1 else 0.0,
        smallest_norm=float(norms.min()),
        median_norm=median,
        largest_norm=float(norms.max()),
        dead=tuple(int(unit) for unit in np.flatnonzero(norms <= DEAD_SHARE * max(median, 1e-300))),
        twins=_twins(rows, norms) if len(rows) <= _MAX_UNITS else None,
        effective_rank=_effective_rank(rows),
    )


def _twins(rows: Any, norms: Any) -> tuple[tuple[int, int], ...]:
    alive = norms > 0
    unit = np.divide(rows, norms[:, None], out=np.zeros_like(rows), where=alive[:, None])
    first, second = np.nonzero(np.triu(unit @ unit.T, 1) > TWIN_COSINE)
    return tuple((int(a), int(b)) for a, b in zip(first[:100], second[:100], strict=True))


def _effective_rank(rows: Any) -> float:
    values = np.linalg.svd(rows[:_MAX_UNITS], compute_uv=False)
    total = values.sum()
    if total == 0:
        return 0.0
    share = values[values > 0] / total
    return float(np.exp(-(share * np.log(share)).sum()))
