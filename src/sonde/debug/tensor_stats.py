"""What can be said about one tensor. Every number is of the finite elements; what is not defined is None."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.debug.numbers import as_floats

HISTOGRAM_BINS: Final = 50
PERCENTILES: Final = (5, 25, 50, 75, 95, 99)
MAX_OUTLIERS: Final = 100

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStats:
    """`std` is the sample standard deviation; `l1_norm` and `l2_norm` are over all elements, not per element."""

    shape: tuple[int, ...]
    dtype: str
    total_elements: int
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    median: float | None
    l1_norm: float | None
    l2_norm: float | None
    infinity_norm: float | None
    nan_count: int
    inf_count: int
    zero_count: int
    memory_usage_bytes: int
    sparsity: float | None
    """Share of zeros among all elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlier:
    """An element far outside the middle half: beyond one and a half of its width."""

    index: tuple[int, ...]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDistribution:
    """How the finite elements are spread."""

    counts: tuple[int, ...]
    edges: tuple[float, ...]
    percentiles: dict[str, float]
    outliers: tuple[Outlier, ...]
    """The farthest first, at most 100 of `num_outliers`."""
    num_outliers: int
    skewness: float | None
    kurtosis: float | None
    """Excess kurtosis: 0 for a normal distribution."""


# Squares of very large numbers overflow to infinity, which is then the honest answer.
@np.errstate(over="ignore", invalid="ignore")
def compute_stats(array: NDArray[Any]) -> TensorStats:
    """Summarise an array."""
    flat = as_floats(array)
    good = flat[np.isfinite(flat)]
    return TensorStats(
        shape=tuple(array.shape),
        dtype=str(array.dtype),
        total_elements=int(flat.size),
        mean=_number(good.mean) if good.size else None,
        std=float(good.std(ddof=1)) if good.size > 1 else None,
        min=_number(good.min) if good.size else None,
        max=_number(good.max) if good.size else None,
        median=float(np.median(good)) if good.size else None,
        l1_norm=float(np.abs(good).sum()) if good.size else None,
        l2_norm=float(np.linalg.norm(good)) if good.size else None,
        infinity_norm=float(np.abs(good).max()) if good.size else None,
        nan_count=int(np.isnan(flat).sum()),
        inf_count=int(np.isinf(flat).sum()),
        zero_count=int((flat == 0).sum()),
        memory_usage_bytes=int(array.nbytes),
        sparsity=float((flat == 0).mean()) if flat.size else None,
    )


@np.errstate(over="ignore", invalid="ignore")
def compute_distribution(array: NDArray[Any]) -> TensorDistribution | None:
    """Describe how an array's elements are spread; None if none of them is finite."""
    flat = as_floats(array)
    good = flat[np.isfinite(flat)]
    if not good.size:
        return None
    counts, edges = np.histogram(good, HISTOGRAM_BINS) if _has_width(good) else _one_bin(good)
    levels = dict(zip(PERCENTILES, np.percentile(good, PERCENTILES).tolist(), strict=True))
    outliers = _outliers(flat, levels[25], levels[75])
    return TensorDistribution(
        counts=tuple(counts.tolist()),
        edges=tuple(edges.tolist()),
        percentiles={f"p{level}": value for level, value in levels.items()},
        outliers=tuple(_outlier(flat, int(place), array.shape) for place in outliers[:MAX_OUTLIERS]),
        num_outliers=len(outliers),
        skewness=_moment(good, 3),
        kurtosis=None if (fourth := _moment(good, 4)) is None else fourth - 3.0,
    )


def _number(of: Any) -> float:
    return float(of())


def _has_width(values: Floats) -> bool:
    width = float(values.max()) - float(values.min())
    return bool(np.isfinite(width) and width / HISTOGRAM_BINS > np.spacing(np.abs(values).max()))


def _one_bin(values: Floats) -> tuple[NDArray[np.int64], Floats]:
    return np.array([values.size]), np.array([values.min(), values.max()])


def _outliers(flat: Floats, low: float, high: float) -> NDArray[np.intp]:
    """Return the places of all outliers, the farthest first."""
    width = high - low
    beyond = np.maximum(low - 1.5 * width - flat, flat - high - 1.5 * width)
    beyond[~np.isfinite(flat)] = -1
    found = np.flatnonzero(beyond > 0)
    order: NDArray[np.intp] = found[np.argsort(-beyond[found], kind="stable")]
    return order


def _outlier(flat: Floats, place: int, shape: tuple[int, ...]) -> Outlier:
    return Outlier(index=_index(place, shape), value=float(flat[place]))


def _index(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(part) for part in np.unravel_index(place, shape)) if shape else ()


def _moment(values: Floats, order: int) -> float | None:
    """Return a standardised central moment, as scipy's `skew` and `kurtosis` do; None for a constant."""
    centred = values - values.mean()
    scale = np.sqrt(np.mean(centred**2))
    # What is left of a constant after subtracting its mean is rounding.
    if not np.isfinite(scale) or scale <= 1e-12 * max(float(np.abs(values).max()), 1e-300):
        return None
    return float(np.mean((centred / scale) ** order))


def to_plain(item: Any) -> dict[str, Any]:
    """Return a summary as a dict, for JSON."""
    return asdict(item)
