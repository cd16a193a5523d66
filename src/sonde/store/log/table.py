"""Readings sorted by site and step: what a segment holds, and what journals become in memory.

Row i of a table is one reading. The rows of site `site[j]` are `offset[j]` to `offset[j + 1]`, in rising order of
steps, so one statistic of one site is one contiguous slice of `stats`. All counts of all histograms lie end to end in
`hist`. A second, short table has one line a block: its step, time, epoch, span, and whether the optimizer was skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sonde.core import schema
from sonde.store.log import codec
from sonde.store.log.codec import Counts, Packed


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """One line a block, in rising order of steps. `epoch` is -1 where none was known."""

    step: NDArray[np.int64]
    time: NDArray[np.float64]
    epoch: NDArray[np.int64]
    skipped: NDArray[np.bool_]
    span: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.step)

    @property
    def last_step(self) -> int | None:
        """The last step that any block covers, or None if there is no block."""
        return int((self.step + self.span).max()) - 1 if len(self) else None

    def take(self, index: NDArray[Any]) -> Blocks:
        """Return the lines that `index` names."""
        return Blocks(self.step[index], self.time[index], self.epoch[index], self.skipped[index], self.span[index])


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Readings sorted by site and step. `merged` counts the readings that thinning put together in a row."""

    site: NDArray[np.uint32]
    offset: NDArray[np.uint64]
    step: NDArray[np.int64]
    span: NDArray[np.uint32]
    merged: NDArray[np.uint32]
    stats: NDArray[np.float64]
    hist_lo: NDArray[np.uint8]
    hist_len: NDArray[np.uint8]
    hist_offset: NDArray[np.uint64]
    hist: Counts
    blocks: Blocks

    def __len__(self) -> int:
        return len(self.step)

    def covering(self, step: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return which sites have a row that covers `step`, as indices of `site`, and which rows these are.

        A binary search in all sites at once: a dozen small gathers, however many rows there are.
        """
        low, high = self.offset[:-1].astype(np.intp), self.offset[1:].astype(np.intp)
        first = low
        while (open_ := low < high).any():
            middle = (low + high) // 2
            before = open_ & (self.step[np.minimum(middle, len(self) - 1)] <= step)
            low, high = np.where(before, middle + 1, low), np.where(open_ & ~before, middle, high)
        at = np.flatnonzero(low > first)
        rows = low[at] - 1
        covers = step - self.step[rows] < self.span[rows]
        return at[covers], rows[covers]


def find_site(site: NDArray[np.uint32], number: int) -> int | None:
    """Return the index of a site in the rising list `site`, or None."""
    at = int(np.searchsorted(site, number))
    return at if at < len(site) and int(site[at]) == number else None


def empty_blocks() -> Blocks:
    """Return a list of no blocks."""
    return concat_blocks([])


def concat_blocks(parts: Sequence[Blocks]) -> Blocks:
    """Put lists of blocks one after the other."""

    def join(name: str, dtype: str) -> NDArray[Any]:
        return np.concatenate([np.zeros(0, dtype), *(getattr(part, name) for part in parts)])

    return Blocks(join("step", "i8"), join("time", "f8"), join("epoch", "i8"), join("skipped", "?"), join("span", "u4"))


def last_of_each(keys: Sequence[NDArray[Any]]) -> NDArray[np.intp]:
    """Return the index that sorts by `keys` (the first counts most), keeping the last of those that are equal."""
    if len(keys) == 1 and bool((keys[0][1:] > keys[0][:-1]).all()):
        return np.arange(len(keys[0]))
    order: NDArray[np.intp] = np.lexsort(list(reversed(keys)))  # stable: what was written later stays later
    if not len(order):
        return order
    differs = np.zeros(len(order) - 1, dtype=bool)
    for key in keys:
        ordered = key[order]
        differs |= ordered[1:] != ordered[:-1]
    chosen: NDArray[np.intp] = order[np.append(differs, True)]
    return chosen


def from_blocks(packed: Sequence[Packed]) -> Table:
    """Sort the rows of blocks by site and step. Of two rows for the same site and step the later one stays."""
    lengths = np.array([len(block.sites) for block in packed], dtype=np.intp)
    blocks = Blocks(
        np.array([block.step for block in packed], dtype=np.int64),
        np.array([block.time for block in packed], dtype=np.float64),
        np.array([block.epoch for block in packed], dtype=np.int64),
        np.array([block.skipped for block in packed], dtype=np.bool_),
        np.array([block.span for block in packed], dtype=np.uint32),
    )
    hist_len = join([block.hist_len for block in packed], "u1")
    return _build(
        site=join([block.sites for block in packed], "u4"),
        step=np.repeat(blocks.step, lengths),
        span=np.repeat(blocks.span, lengths),
        merged=np.ones(int(lengths.sum()), dtype=np.uint32),
        columns=[[block.stats[column] for block in packed] for column in range(schema.NUM_COLUMNS)],
        hist_lo=join([block.hist_lo for block in packed], "u1"),
        hist_len=hist_len,
        hist_start=starts(hist_len)[:-1],
        hist=_join_counts([block.hist for block in packed]),
        blocks=blocks,
    )


def merge(tables: Sequence[Table]) -> Table:
    """Put tables together, the older ones first. Of two rows for the same site and step the later one stays."""
    bases = np.cumsum([0, *(len(table.hist) for table in tables)]).astype(np.uint64)
    return _build(
        site=join([np.repeat(table.site, np.diff(table.offset).astype(np.intp)) for table in tables], "u4"),
        step=join([table.step for table in tables], "i8"),
        span=join([table.span for table in tables], "u4"),
        merged=join([table.merged for table in tables], "u4"),
        columns=[[table.stats[column] for table in tables] for column in range(schema.NUM_COLUMNS)],
        hist_lo=join([table.hist_lo for table in tables], "u1"),
        hist_len=join([table.hist_len for table in tables], "u1"),
        hist_start=join([table.hist_offset[:-1] + base for table, base in zip(tables, bases, strict=False)], "u8"),
        hist=_join_counts([table.hist for table in tables]),
        blocks=concat_blocks([table.blocks for table in tables]),
    )


def _build(
    *,
    site: NDArray[np.uint32],
    step: NDArray[np.int64],
    span: NDArray[np.uint32],
    merged: NDArray[np.uint32],
    columns: list[list[NDArray[np.float64]]],
    hist_lo: NDArray[np.uint8],
    hist_len: NDArray[np.uint8],
    hist_start: NDArray[np.uint64],
    hist: Counts,
    blocks: Blocks,
) -> Table:
    order = last_of_each([site, step])
    ids, firsts = np.unique(site[order], return_index=True)
    stats = np.empty((schema.NUM_COLUMNS, len(order)))
    for column, parts in enumerate(columns):  # one column at a time: at most one is held twice
        np.take(join(parts, "f8"), order, out=stats[column], mode="clip")
    length = hist_len[order]
    return Table(
        site=ids.astype(np.uint32),
        offset=np.append(firsts, len(order)).astype(np.uint64),
        step=step[order],
        span=span[order],
        merged=merged[order],
        stats=stats,
        hist_lo=hist_lo[order],
        hist_len=length,
        hist_offset=starts(length),
        hist=gather_counts(hist, hist_start[order], length),
        blocks=blocks.take(last_of_each([blocks.step])),
    )


def gather_counts(hist: Counts, first: NDArray[np.uint64], lengths: NDArray[np.uint8]) -> Counts:
    """Return the counts of some histograms, end to end."""
    offsets = starts(lengths)
    total = int(offsets[-1])
    shift = first.astype(np.int64) - offsets[:-1].astype(np.int64)
    gathered: Counts = hist[np.repeat(shift, lengths) + np.arange(total)]
    return gathered


def starts(lengths: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return where each of these lengths begins when they lie end to end, and where the last one ends."""
    return np.concatenate([np.zeros(1, np.uint64), np.cumsum(lengths, dtype=np.uint64)])


def join(parts: Sequence[NDArray[Any]], dtype: str) -> NDArray[Any]:
    """Put arrays end to end; none at all make an empty one of `dtype`."""
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def _join_counts(parts: Sequence[Counts]) -> Counts:
    # Mixed widths become u64, as numpy promotes.
    return join(parts, "u4")


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """One reading for each of some sites."""

    site: NDArray[np.int64]
    step: NDArray[np.int64]
    span: NDArray[np.uint32]
    rows: NDArray[np.float64]
    bins: NDArray[np.uint64]
    binned: NDArray[np.bool_]

    @classmethod
    def none(cls) -> Snapshot:
        """Return the snapshot of no site."""
        empty = np.zeros(0, np.int64)
        rows, bins = np.zeros((0, schema.NUM_COLUMNS)), np.zeros((0, schema.NUM_BINS), np.uint64)
        return cls(empty, empty, empty.astype(np.uint32), rows, bins, empty.astype(bool))

    @classmethod
    def of(cls, rows: Table, at: NDArray[np.intp], index: NDArray[np.intp]) -> Snapshot:
        """Take the rows `index`, which belong to the sites `at`."""
        length = rows.hist_len[index]
        counts = gather_counts(rows.hist, rows.hist_offset[index], length)
        bins, binned = codec.unpack_bins(rows.hist_lo[index], length, counts)
        stats = np.ascontiguousarray(rows.stats[:, index].T)
        return cls(rows.site[at].astype(np.int64), rows.step[index], rows.span[index], stats, bins, binned)

    @classmethod
    def join(cls, parts: list[Snapshot]) -> Snapshot:
        """Put snapshots one after the other."""
        names = ("site", "step", "span", "rows", "bins", "binned")
        return cls(*(np.concatenate([getattr(part, name) for part in [cls.none(), *parts]]) for name in names))

    def __len__(self) -> int:
        return len(self.site)

    def take(self, index: NDArray[Any]) -> Snapshot:
        """Return the readings that `index` names."""
        names = ("site", "step", "span", "rows", "bins", "binned")
        return Snapshot(*(getattr(self, name)[index] for name in names))

    def update(self, newer: Snapshot) -> Snapshot:
        """Return this snapshot with what a newer one says."""
        if not len(self):
            return newer
        joined = Snapshot.join([self, newer])
        return joined.take(last_of_each([joined.site]))

    def merged(self) -> Snapshot:
        """Return the readings of the same site, from several ranks, merged into one."""
        shot = self.take(np.argsort(self.site, kind="stable"))
        if not len(shot):
            return shot
        starts = np.flatnonzero(np.append(True, shot.site[1:] != shot.site[:-1]))
        end = np.maximum.reduceat(shot.step + shot.span, starts)
        step = np.minimum.reduceat(shot.step, starts)
        return Snapshot(
            site=shot.site[starts],
            step=step,
            span=(end - step).astype(np.uint32),
            rows=schema.merge_groups(shot.rows, starts),
            bins=np.add.reduceat(shot.bins, starts, axis=0),
            binned=np.logical_and.reduceat(shot.binned, starts),
        )
