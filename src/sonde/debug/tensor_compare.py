"""Two tensors, element by element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sonde.debug.numbers import as_floats, is_lent
from sonde.errors import OptionError

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


def _relative(x: NDArray[np.float64], y: NDArray[np.float64], away: NDArray[np.float64]) -> float | None:
    if not x.size:
        return None
    scale = np.maximum(np.abs(x), np.abs(y))
    return float(np.divide(away, scale, out=np.zeros_like(away), where=scale > 0).max())


def _cosine(x: NDArray[np.float64], y: NDArray[np.float64]) -> float | None:
    lengths = float(np.linalg.norm(x)) * float(np.linalg.norm(y))
    return float(np.clip(x @ y / lengths, -1.0, 1.0)) if lengths > 0 and np.isfinite(lengths) else None


def _worst(
    a: NDArray[np.float64], b: NDArray[np.float64], both: NDArray[np.bool_], shape: tuple[int, ...]
) -> tuple[int, ...] | None:
    if not both.any():
        return None
    away = np.where(both, np.abs(np.where(both, a, 0.0) - np.where(both, b, 0.0)), -1.0)
    place = int(away.argmax())
    return tuple(int(part) for part in np.unravel_index(place, shape)) if shape else ()


def _ulp(left: NDArray[Any], right: NDArray[Any]) -> int | None:
    kinds = {left.dtype, right.dtype}
    floats = {kind for kind in kinds if kind.kind == "f" or is_lent(kind)}
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
