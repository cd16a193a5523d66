"""Readings of many sites at once.

A picture of all layers asks for hundreds of sites, and each lies in every segment: one by one they cost as many small
reads as there are pairs of the two; together, one gather a column and segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sonde import schema
from sonde.store import table
from sonde.store.series import Readings
from sonde.store.table import Table

Index = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Find:
    """Where some of the wanted sites lie in one table, and the step from which its readings do not count."""

    rows: Callable[[], Table]
    at: Index
    """The places of the sites in the table, in rising order."""
    wanted: Index
    """Which of the wanted sites each of them is."""
    limit: int | None


def find(sites: NDArray[np.uint32], numbers: NDArray[np.int64]) -> tuple[Index, Index]:
    """Return the places of some numbers in a rising list of sites, rising too, and which of the numbers each is."""
    if not len(sites):
        return np.zeros(0, np.intp), np.zeros(0, np.intp)
    place = np.minimum(np.searchsorted(sites, numbers), len(sites) - 1)
    known = np.flatnonzero(sites[place] == numbers)
    order = known[np.argsort(place[known], kind="stable")]
    return place[order], order


def gather(
    finds: Iterable[Find], count: int, columns: Sequence[int], start: int | None, stop: int | None
) -> list[Readings]:
    """Return the readings of `count` sites, in order of steps; of two for the same step the later one stays."""
    pieces = [_piece(found, columns, start, stop) for found in finds]
    owner = _join([piece.owner for piece in pieces], "u4")
    order = np.argsort(owner.astype(np.uint16) if count < 1 << 16 else owner, kind="stable")
    bounds = np.searchsorted(owner[order], np.arange(count + 1)).tolist()
    step, span, merged, binned = (
        _join([getattr(piece, name) for piece in pieces], dtype)[order]
        for name, dtype in (("step", "i8"), ("span", "u4"), ("merged", "u4"), ("binned", "?"))
    )
    # Column by column in memory: those that nobody asked for stay untouched zeros, which cost nothing.
    stats = np.zeros((schema.NUM_COLUMNS, len(order)))
    for place, column in enumerate(columns):
        np.take(_join([piece.stats[place] for piece in pieces], "f8"), order, out=stats[column], mode="clip")
    out = []
    for first, last in pairwise(bounds):
        mine = slice(first, last)
        keep: Any = slice(None)
        if last - first > 1 and not (step[mine][1:] > step[mine][:-1]).all():
            keep = table.last_of_each([step[mine]])
        out.append(
            Readings(
                step=step[mine][keep],
                span=span[mine][keep],
                merged=merged[mine].astype(np.float64)[keep],
                rows=stats[:, mine].T[keep],
                bins=None,
                binned=binned[mine][keep],
            )
        )
    return out


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one table has of the wanted sites, site by site."""

    owner: NDArray[np.uint32]
    step: NDArray[np.int64]
    span: NDArray[np.uint32]
    merged: NDArray[np.uint32]
    binned: NDArray[np.bool_]
    stats: list[NDArray[np.float64]]


def _piece(found: Find, columns: Sequence[int], start: int | None, stop: int | None) -> _Piece:
    rows = found.rows()
    first, last = rows.offset[found.at].astype(np.intp), rows.offset[found.at + 1].astype(np.intp)
    lengths = last - first
    # The rows of each site in turn: its first one, and how far inside its own part each is.
    before = np.cumsum(lengths) - lengths
    index = np.repeat(first - before, lengths) + np.arange(int(lengths.sum()))
    owner = np.repeat(found.wanted, lengths).astype(np.uint32)
    step = rows.step[index]
    least = min((each for each in (stop, found.limit) if each is not None), default=None)
    if start is not None or least is not None:
        inside = np.ones(len(step), bool) if start is None else step >= start
        inside &= True if least is None else step < least
        index, owner, step = index[inside], owner[inside], step[inside]
    return _Piece(
        owner, step, rows.span[index], rows.merged[index], rows.hist_len[index] > 0,
        [rows.stats[column][index] for column in columns],
    )  # fmt: skip


def _join(parts: list[NDArray[Any]], dtype: str) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
