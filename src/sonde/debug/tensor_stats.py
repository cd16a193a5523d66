"""Statistics of tensors that are passed in: one tensor, two of them compared, and one over many inspections.

Numbers are over the finite elements; what is not defined is None.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sonde.core import schema
from sonde.debug.numbers import as_floats, is_extended
from sonde.diagnosis.judgement import LEVEL_VALUES, MOMENT_WINDOW, shift_now
from sonde.errors import OptionError
from sonde.records import Reading

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


# Squares of very large numbers overflow to infinity, which is then the answer.
@np.errstate(over="ignore", invalid="ignore")
def compute_stats(array: NDArray[Any]) -> TensorStats:
    """Summarise an array: the statistics of a `Reading`, and the median."""
    flat = as_floats(array)
    reading = Reading.of(flat)
    good = flat[np.isfinite(flat)]
    return TensorStats(
        shape=tuple(array.shape),
        dtype=str(array.dtype),
        total_elements=reading.count,
        mean=reading.mean,
        std=reading.std,
        min=reading.min,
        max=reading.max,
        median=float(np.median(good)) if good.size else None,
        l1_norm=float(reading.row[schema.ABS_SUM]) if good.size else None,
        l2_norm=reading.norm,
        infinity_norm=reading.get("abs_max"),
        nan_count=int(reading.row[schema.NAN]),
        inf_count=int(reading.get("inf") or 0),
        zero_count=int(reading.row[schema.ZERO]),
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
        outliers=tuple(
            Outlier(index=_index(int(place), array.shape), value=float(flat[place]))
            for place in outliers[:MAX_OUTLIERS]
        ),
        num_outliers=len(outliers),
        skewness=_moment(good, 3),
        kurtosis=None if (fourth := _moment(good, 4)) is None else fourth - 3.0,
    )


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


_BITS: Final = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorComparison:
    """How two tensors differ. Numbers are over elements that are finite in both; None where there is no such number."""

    mse: float | None
    mean_absolute_difference: float | None
    max_absolute_difference: float | None
    max_relative_error: float | None
    """Largest |a - b| / max(|a|, |b|)."""
    cosine_similarity: float | None
    correlation: float | None
    """Pearson's; None if either is constant."""
    max_ulp: int | None
    """Largest distance in units in the last place of the coarser type; None for whole numbers."""
    worst_index: tuple[int, ...] | None
    """Where the largest absolute difference is."""
    equal: bool
    """Same shape and the same value everywhere; NaN equals NaN."""
    num_nonfinite_mismatches: int
    """Elements that are NaN or infinite in one and something else in the other."""


def compare_arrays(left: NDArray[Any], right: NDArray[Any]) -> TensorComparison:
    """Compare two arrays of the same shape, of whatever types.

    Raises:
        OptionError: Their shapes differ.

    """
    if left.shape != right.shape:
        raise OptionError(f"Tensors of shapes {left.shape} and {right.shape} cannot be compared element by element.")
    a, b = as_floats(left), as_floats(right)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    both = np.isfinite(a) & np.isfinite(b)
    x, y = a[both], b[both]
    away = np.abs(x - y)
    return TensorComparison(
        mse=float(np.mean(away**2)) if x.size else None,
        mean_absolute_difference=float(away.mean()) if x.size else None,
        max_absolute_difference=float(away.max()) if x.size else None,
        max_relative_error=_relative(x, y, away),
        cosine_similarity=_cosine(x, y),
        correlation=_cosine(x - x.mean(), y - y.mean()) if x.size > 1 else None,
        max_ulp=_ulp(left.reshape(-1)[both], right.reshape(-1)[both]),
        worst_index=_worst(a, b, both, left.shape),
        equal=bool(same.all()),
        num_nonfinite_mismatches=int((~both & ~same).sum()),
    )


def _relative(x: Floats, y: Floats, away: Floats) -> float | None:
    if not x.size:
        return None
    scale = np.maximum(np.abs(x), np.abs(y))
    return float(np.divide(away, scale, out=np.zeros_like(away), where=scale > 0).max())


def _cosine(x: Floats, y: Floats) -> float | None:
    lengths = float(np.linalg.norm(x)) * float(np.linalg.norm(y))
    return float(np.clip(x @ y / lengths, -1.0, 1.0)) if lengths > 0 and np.isfinite(lengths) else None


def _worst(a: Floats, b: Floats, both: NDArray[np.bool_], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    if not both.any():
        return None
    away = np.where(both, np.abs(np.where(both, a, 0.0) - np.where(both, b, 0.0)), -1.0)
    return _index(int(away.argmax()), shape)


def _ulp(left: NDArray[Any], right: NDArray[Any]) -> int | None:
    kinds = {left.dtype, right.dtype}
    floats = {kind for kind in kinds if kind.kind == "f" or is_extended(kind)}
    if kinds != floats or not left.size:
        return None
    # bfloat16 has fewer digits than float16, though both have two bytes.
    coarse = min(floats, key=lambda kind: ml_dtypes.finfo(kind).nmant)  # type: ignore[no-untyped-call] # no types
    ranks = [_rank(array.astype(coarse)) for array in (left, right)]
    return max(abs(int(a) - int(b)) for a, b in zip(*(r.tolist() for r in ranks), strict=True))


def _rank(array: NDArray[Any]) -> NDArray[Any]:
    """Map floats to whole numbers so that neighbours differ by one; both zeros become 0."""
    bits = array.view(_BITS[array.dtype.itemsize])
    lowest = np.iinfo(bits.dtype).min
    wide = bits.astype(np.int64) if bits.dtype != np.int64 else bits
    result: NDArray[Any] = np.where(wide < 0, np.int64(lowest) - wide, wide)
    return result


DRIFT_POINTS: Final = int(LEVEL_VALUES)
_MAX_POINTS: Final = 1000
_FIELDS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """How far the mean of a named tensor has moved, from its first inspections to its last."""

    name: str
    first: float
    last: float
    change: float
    """Relative to where it began, or to its typical spread if that is larger."""
    drifted: bool


@dataclass(slots=True)
class MeanSeries:
    """Time, mean, standard deviation and largest magnitude of the last inspections of a tensor; NaN if not known."""

    name: str
    total: int = 0
    """How many inspections there were, including those that are forgotten."""
    reported: bool = False
    """Whether its drift has been reported."""
    _flat: array[float] = field(default_factory=lambda: array("d"))

    def add(self, time: float, mean: float, std: float | None, largest: float | None = None) -> None:
        """Add an inspection."""
        self.total += 1
        self._flat.extend((time, mean, *(math.nan if value is None else value for value in (std, largest))))
        # The oldest go a quarter at a time: cutting the front moves all the rest.
        if len(self._flat) >= _FIELDS * (_MAX_POINTS + _MAX_POINTS // 4):
            del self._flat[: _FIELDS * (_MAX_POINTS // 4)]

    def __len__(self) -> int:
        return min(len(self._flat) // _FIELDS, _MAX_POINTS)

    def points(self) -> Floats:
        """Return the inspections as rows, oldest first."""
        return np.array(self._flat).reshape(-1, _FIELDS)[-_MAX_POINTS:]

    def largest(self) -> list[float]:
        """Return the largest magnitudes before the last inspection, as far as they are known."""
        last = MOMENT_WINDOW + 1
        values: list[float] = np.array(self._flat[-_FIELDS * last :]).reshape(-1, _FIELDS)[:-1, 3].tolist()
        return values

    def drift(self) -> Drift | None:
        """Return how far the mean has moved; None below ten inspections."""
        points = self.points()
        spreads = points[:, 2][np.isfinite(points[:, 2])]
        spread = float(np.median(spreads)) if len(spreads) else 0.0
        moment = shift_now(points[:, 1].tolist(), spread)
        if moment.usual is None:
            return None
        change = (moment.value - moment.usual) / max(abs(moment.usual), spread, 1e-300)
        return Drift(name=self.name, first=moment.usual, last=moment.value, change=change, drifted=moment.is_wrong)
