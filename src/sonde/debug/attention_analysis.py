"""Attention heads: how widely each looks, at what, and which do the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from sonde.debug.numbers import as_array
from sonde.errors import OptionError

Pattern = Literal["diagonal", "uniform", "focused", "mixed"]
_DIAGONAL: Final = 0.5
_UNIFORM: Final = 0.9
_FOCUSED: Final = 0.3
REDUNDANT: Final = 0.95


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
    first, second = np.nonzero(np.triu(unit @ unit.T, 1) >= REDUNDANT)
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
