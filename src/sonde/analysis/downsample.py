"""Reduce the points of a curve for drawing; extremes and gaps are kept.

`thin` keeps points of a curve, for line plots. `columns` makes one number per column of a table cell or heat map.
`spaced` picks some of many items.
A value that is not finite is a gap here, whatever made it so.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Steps = NDArray[np.int64]
Values = NDArray[np.float64]
T = TypeVar("T")

# Per bucket `thin` keeps the first, lowest, highest and last value and one gap.
_KEPT_PER_BUCKET = 5


def thin(steps: Steps, values: Values, points: int) -> tuple[Steps, Values]:
    """Return at most `points` of the readings, in order.

    Every bucket of neighbours keeps its first, lowest, highest and last value, so a spike of one step is never lost,
    and one gap where it has any, so a curve stays broken where it was broken.
    """
    if len(steps) <= points:
        return steps, values
    edges = np.linspace(0, len(steps), max(points // _KEPT_PER_BUCKET, 1) + 1).astype(np.intp)
    kept: set[int] = set()
    for start, stop in pairwise(edges):
        kept |= _landmarks(values[start:stop], int(start))
    index = np.array(sorted(kept), dtype=np.intp)
    return steps[index], values[index]


def _landmarks(values: Values, offset: int) -> set[int]:
    known = np.flatnonzero(np.isfinite(values))
    gaps = np.flatnonzero(~np.isfinite(values))
    kept = {int(gaps[0])} if len(gaps) else set()
    if len(known):
        inside = values[known]
        kept |= {int(known[i]) for i in (0, inside.argmin(), inside.argmax(), -1)}
    return {offset + i for i in kept}


def column_edges(first: int, last: int, width: int) -> Values:
    """Cut the steps `first` to `last` into columns: at most `width`, none narrower than a step. Returns the edges."""
    return np.linspace(first, last + 1, max(1, min(width, last - first + 1)) + 1)


def columns(steps: Steps, values: Values, edges: Values) -> Values:
    """Return the median of the finite values between each pair of edges; NaN where there is none."""
    out = np.full(len(edges) - 1, np.nan)
    cuts = np.searchsorted(steps, edges)
    for column, (start, stop) in enumerate(pairwise(cuts)):
        part = values[start:stop]
        part = part[np.isfinite(part)]
        if len(part):
            out[column] = _median(part)
    return out


def _median(values: Values) -> float:
    # Of two in the middle the halves are added: the sum may be beyond the largest number.
    ordered = np.sort(values)
    lower, upper = float(ordered[(len(ordered) - 1) // 2]), float(ordered[len(ordered) // 2])
    return lower if lower == upper else lower / 2 + upper / 2


def any_in_columns(steps: Steps, flags: NDArray[np.bool_], edges: Values) -> NDArray[np.bool_]:
    """Return, for each pair of edges, whether any flag between them is set."""
    cuts = np.searchsorted(steps, edges)
    total = np.concatenate([[0], np.cumsum(flags)])
    result: NDArray[np.bool_] = total[cuts[1:]] > total[cuts[:-1]]
    return result


def spaced(items: Sequence[T], most: int) -> list[T]:
    """Return at most `most` items, evenly spaced from the first to the last.

    >>> spaced(range(1000), 5)
    [0, 249, 499, 749, 999]
    """
    if len(items) <= most:
        return list(items)
    return [items[index] for index in np.linspace(0, len(items) - 1, most).astype(int)]
