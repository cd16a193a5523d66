"""Weights by their units, and attention weights by their heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sonde.debug.numbers import as_array, is_extended
from sonde.errors import OptionError

Pattern = Literal["diagonal", "uniform", "focused", "mixed"]

_MAX_UNITS: Final = 2048
_MAX_TWINS: Final = 100
# These name the shape of a map and judge nothing: the doctor's rule on attention has its own thresholds.
_DIAGONAL: Final = 0.5
_UNIFORM: Final = 0.9
_FOCUSED: Final = 0.3
_ALIKE: Final = 0.95


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
    """Units whose weights are zero, or too small to change a sum with the largest unit's."""
    twins: tuple[tuple[int, int], ...] | None
    """Pairs of units that differ by a factor and rounding only, at most 100; None for more than 2,048 units."""
    effective_rank: float
    """How many directions the rows really span: the exponential of the entropy of the singular values."""


def analyze_weights(weight: Any, name: str = "weight") -> WeightAnalysis:
    """Analyse a weight `[units, ...]`.

    Raises:
        OptionError: It has fewer than two dimensions, or elements that are not finite.

    """
    given = as_array(weight, name)
    array = given.astype(np.float64)
    if array.ndim < 2 or not array.size:
        raise OptionError(f"{name}: units are the rows of a weight with two dimensions or more; got {array.shape}.")
    if not np.isfinite(array).all():
        raise OptionError(f"{name} has elements that are not finite; inspect_tensor counts them.")
    rows = array.reshape(len(array), -1)
    norms = np.linalg.norm(rows, axis=1)
    resolution = resolution_of(given.dtype)
    return WeightAnalysis(
        name=name,
        units=len(rows),
        mean=float(rows.mean()),
        std=float(rows.std(ddof=1)) if rows.size > 1 else 0.0,
        smallest_norm=float(norms.min()),
        median_norm=float(np.median(norms)),
        largest_norm=float(norms.max()),
        dead=tuple(int(unit) for unit in np.flatnonzero(norms <= resolution * norms.max())),
        twins=tuple(twins(rows, resolution)[:_MAX_TWINS]) if len(rows) <= _MAX_UNITS else None,
        effective_rank=effective_rank(rows[:_MAX_UNITS]),
    )


def resolution_of(dtype: np.dtype[Any]) -> float:
    """Return the smallest relative difference that a type can hold, and at least that of float32."""
    is_float = dtype.kind == "f" or is_extended(dtype)
    known = float(ml_dtypes.finfo(dtype).eps) if is_float else 0.0  # type: ignore[no-untyped-call] # no types
    return max(known, float(np.finfo(np.float32).eps))


def twins(rows: NDArray[np.float64], resolution: float) -> list[tuple[int, int]]:
    """Return the pairs of rows that point the same way, but for rounding."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = np.divide(rows, norms, out=np.zeros_like(rows), where=norms > 0)
    first, second = np.nonzero(np.triu(unit @ unit.T, 1) >= 1 - resolution)
    return [(int(a), int(b)) for a, b in zip(first, second, strict=True)]


def effective_rank(rows: NDArray[np.float64]) -> float:
    """Return how many directions rows span: the exponential of the entropy of the singular values (Roy & Vetterli)."""
    values = np.linalg.svd(rows, compute_uv=False)
    total = values.sum()
    if total == 0:
        return 0.0
    share = values[values > 0] / total
    return float(np.exp(-(share * np.log(share)).sum()))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionHead:
    """One head."""

    head: int
    entropy: float
    """Mean over rows of the entropy, as a part of the largest possible: 0 looks at one place, 1 at all alike."""
    diagonal: float
    """Mean weight on a token itself and its neighbours."""
    most_attended: int
    """The place that gets the most attention."""
    most_attended_share: float
    pattern: Pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionAnalysis:
    """All heads of a layer."""

    heads: tuple[AttentionHead, ...]
    redundant: tuple[tuple[int, int], ...]
    """Pairs of heads whose maps are nearly the same (cosine of 0.95 or more)."""


def analyze_attention(weights: Any) -> AttentionAnalysis:
    """Analyse attention weights `[batch, heads, queries, keys]` or `[heads, queries, keys]`.

    Raises:
        OptionError: They have another shape, or rows that do not add up to 1.

    """
    array = as_array(weights, "attention weights").astype(np.float64)
    array = array[None] if array.ndim == 3 else array
    if array.ndim != 4 or not array.size:
        raise OptionError(f"Attention weights have shape [batch, heads, queries, keys]; got {array.shape}.")
    if not np.allclose(array.sum(-1), 1.0, atol=1e-2):
        raise OptionError("The rows of attention weights add up to 1; these do not. Are they scores before softmax?")
    maps = array.mean(0)
    heads = tuple(_head(index, array[:, index]) for index in range(array.shape[1]))
    flat = maps.reshape(len(maps), -1)
    unit = flat / np.linalg.norm(flat, axis=1, keepdims=True)
    first, second = np.nonzero(np.triu(unit @ unit.T, 1) >= _ALIKE)
    return AttentionAnalysis(heads=heads, redundant=tuple((int(a), int(b)) for a, b in zip(first, second, strict=True)))


def _head(index: int, weights: NDArray[np.float64]) -> AttentionHead:
    keys = weights.shape[-1]
    logs = np.log(np.where(weights > 0, weights, 1.0))
    entropy = float(-(weights * logs).sum(-1).mean() / np.log(keys)) if keys > 1 else 0.0
    queries = np.arange(weights.shape[-2])[:, None]
    near = np.abs(np.arange(keys)[None, :] - queries) <= 1
    diagonal = float((weights * near).sum(-1).mean())
    received = weights.mean((0, 1))
    top = int(received.argmax())
    return AttentionHead(
        head=index,
        entropy=entropy,
        diagonal=diagonal,
        most_attended=top,
        most_attended_share=float(received[top]),
        pattern=_pattern(entropy, diagonal, keys),
    )


def _pattern(entropy: float, diagonal: float, keys: int) -> Pattern:
    # Of few keys three neighbours are most anyway.
    if diagonal > max(_DIAGONAL, 6.0 / keys):
        return "diagonal"
    if entropy > _UNIFORM:
        return "uniform"
    return "focused" if entropy < _FOCUSED else "mixed"
