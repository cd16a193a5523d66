"""Keep a run within its budget of bytes at every moment, and thin old steps: they are merged into windows."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.core import schema
from sonde.store.log import attempts, codec
from sonde.store.log.attempts import Attempt
from sonde.store.log.segment import Segment
from sonde.store.log.table import Blocks, Table, starts

MAX_DEFAULT_BYTES: Final = 16 << 30
MIN_BYTES: Final = 1 << 20
_SHARE: Final = 32
_LARGEST_SHARE: Final = 10
_SMALL_SHARE_BYTES: Final = 128 << 10
MOST_LINES_BYTES: Final = 24 << 20
"""The largest file of events or of findings: readers hold it in memory, and read no more than they can hold."""
_WAIT_S: Final = 20.0
"""How long a block waits for the sealer to make room before it is dropped."""
_ROWS_AT_ONCE: Final = 1 << 16  # histograms are spread out to 512 bytes a row while they are merged


def default_budget(folder: Path) -> int:
    """Return a tenth of the free space, at most 16 GiB."""
    return max(MIN_BYTES, min(shutil.disk_usage(folder).free // 10, MAX_DEFAULT_BYTES))


def folder_bytes(folder: Path) -> int:
    """Return how many bytes the files of a folder hold."""
    total = 0
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):
            total += entry.stat().st_size
    return total


class Room:
    """The bytes that a rank may use, cut into shares: a thirty-second of them, or a tenth where they are few.

    Every segment repeats what its sites are. In shares that are hardly larger than that, a run that was resumed often
    would hold little else, and could not be thinned.

    No journal or segment takes more than one share, so thinning has a grain. Three shares are left for what is
    rewritten, since the old file is there until the new one is in its place; thinning begins three shares earlier, for
    the journals that fill meanwhile. Events and findings count, and take at most three shares, or 24 MB each.
    """

    def __init__(self, folder: Path, budget: int, others: Callable[[], int]) -> None:
        self.budget = budget
        self.share = max(budget // _SHARE, min(budget // _LARGEST_SHARE, _SMALL_SHARE_BYTES))
        self.events_bytes, self.findings_bytes = (
            min(2 * self.share, MOST_LINES_BYTES),
            min(self.share, MOST_LINES_BYTES),
        )
        self._folder = folder
        self._others = others
        self._limit = budget - 3 * self.share
        self._used = budget  # unknown: the first to ask has it measured
        self._freed = threading.Event()

    @property
    def target(self) -> int:
        """How many bytes there may be before old steps are thinned."""
        return self._limit - 3 * self.share

    def used(self) -> int:
        """Return the bytes that are used now."""
        self._used = folder_bytes(self._folder) + self._others()
        return self._used

    def note_change(self) -> None:
        """Note that files were rewritten or deleted."""
        self._freed.set()

    def take(self, nbytes: int, may_wait: Callable[[], bool], *, begins: bool = False) -> bool:
        """Return whether this many bytes may be written; wait while another thread is making room.

        What `begins` a journal may use one of the shares that are left for rewriting: nothing is thinned before a run
        that is resumed has begun. It looks at the folder only where what is known to be there would not leave enough.
        """
        deadline = time.monotonic() + _WAIT_S
        limit = self._limit + (self.share if begins else 0)
        while self._used + nbytes > limit:
            self._freed.clear()
            if self.used() + nbytes <= limit:
                break
            if not may_wait() or time.monotonic() > deadline:
                return False
            self._freed.wait(0.05)
        self._used += nbytes
        return True


def thin(rows: Table, window: int) -> Table:
    """Merge all readings of a site whose steps lie in the same window: `[0, window)`, `[window, 2 * window)`, ...

    All that is merged covers the steps of its window's blocks, so a window reads like one block with a longer span.
    """
    old = rows.blocks
    block_starts = _first_of_each(old.step // window)
    end = np.maximum.reduceat(old.step + old.span, block_starts)
    first = old.step[block_starts]
    blocks = Blocks(
        step=first,
        time=np.maximum.reduceat(old.time, block_starts),
        epoch=old.epoch[block_starts],
        skipped=np.logical_or.reduceat(old.skipped, block_starts),
        span=np.minimum(end - first, codec.MAX_SPAN).astype(np.uint32),
    )
    sites = np.repeat(np.arange(len(rows.site)), np.diff(rows.offset).astype(np.intp))
    key = rows.step // window
    groups = _first_of_each(sites, key)
    lo, length, hist = _merge_bins(rows, groups)
    # Every row came with a block, so its window is among those of the blocks.
    home = np.searchsorted(first // window, key[groups])
    return Table(
        site=rows.site,
        offset=np.searchsorted(groups, rows.offset).astype(np.uint64),
        step=blocks.step[home],
        span=blocks.span[home],
        merged=np.add.reduceat(rows.merged, groups, dtype=np.uint32),
        stats=np.ascontiguousarray(schema.merge_groups(np.ascontiguousarray(rows.stats.T), groups).T),
        hist_lo=lo,
        hist_len=length,
        hist_offset=starts(length),
        hist=hist,
        blocks=blocks,
    )


def _first_of_each(*keys: NDArray[Any]) -> NDArray[np.intp]:
    """Return where a run of equal keys begins."""
    differs = np.ones(len(keys[0]), dtype=bool)
    differs[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return np.flatnonzero(differs)


@dataclass(frozen=True, slots=True)
class _Chunk:
    first: int
    last: int
    groups: NDArray[np.intp]


def _chunks(groups: NDArray[np.intp], num_rows: int) -> list[_Chunk]:
    bounds = np.append(groups, num_rows)
    cuts = np.unique(np.searchsorted(bounds, np.arange(0, num_rows, _ROWS_AT_ONCE)))
    cuts = np.append(cuts[cuts < len(groups)], len(groups))
    pairs = zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)
    return [_Chunk(int(bounds[a]), int(bounds[b]), groups[a:b] - bounds[a]) for a, b in pairs]


def _merge_bins(rows: Table, groups: NDArray[np.intp]) -> tuple[NDArray[np.uint8], NDArray[np.uint8], codec.Counts]:
    """Add up the histograms of each group; where a part has none, the whole has none (as `Reading.merge`)."""
    if not rows.hist_len.any():
        nothing = np.zeros(len(groups), dtype=np.uint8)
        return nothing, nothing, np.zeros(0, dtype=np.uint32)
    lows, lengths = [], []
    counts: list[NDArray[Any]] = []
    for chunk in _chunks(groups, len(rows)):
        cut = slice(chunk.first, chunk.last)
        flat = rows.hist[int(rows.hist_offset[chunk.first]) : int(rows.hist_offset[chunk.last])]
        bins, binned = codec.unpack_bins(rows.hist_lo[cut], rows.hist_len[cut], flat)
        whole = np.logical_and.reduceat(binned, chunk.groups)
        merged = np.add.reduceat(bins, chunk.groups, axis=0)
        low, length, packed = codec.pack_bins(np.where(whole[:, None], merged, 0).astype(np.uint64), whole)
        lows.append(low)
        lengths.append(length)
        counts.append(packed)
    joined: codec.Counts = np.concatenate(counts)
    return np.concatenate(lows), np.concatenate(lengths), joined


FAN_IN: Final = 8
"""This many small neighbours of like size become one."""
MAX_SEGMENT_BYTES: Final = 96 << 20
"""Larger segments would be fewer, and slower to read all sites of one step from."""
MAX_WINDOW: Final = 1 << 30
_SMALLEST_TIER: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Entry:
    """A segment, without what it holds."""

    first: int
    last: int
    name: str
    nbytes: int
    fixed_bytes: int
    """What it would have without rows: mostly the description of its sites."""
    window: int
    num_blocks: int
    first_step: int
    end_step: int
    """One past its last step."""
    attempts: list[Attempt]

    @classmethod
    def of(cls, first: int, last: int, segment: Segment) -> Entry:
        """Describe a segment that holds journals `first` to `last`."""
        blocks = segment.blocks
        return cls(
            first=first,
            last=last,
            name=segment.path.name,
            nbytes=segment.stamp.size,
            fixed_bytes=segment.fixed_bytes,
            window=segment.window,
            num_blocks=len(blocks),
            first_step=int(blocks.step[0]) if len(blocks) else 0,
            end_step=int(blocks.step[-1]) + int(blocks.span[-1]) if len(blocks) else 0,
            attempts=segment.attempts,
        )

    @property
    def tier(self) -> int:
        """The order of magnitude of its size. Merging only equals keeps rewriting to a logarithm."""
        return max(0, int(math.log(self.nbytes / _SMALLEST_TIER, FAN_IN))) if self.nbytes > _SMALLEST_TIER else 0


def to_compact(entries: Sequence[Entry], max_bytes: int) -> list[Entry]:
    """Return neighbours to put together, or nothing: enough small ones, or as many as fill a segment."""
    for run in _runs(entries, _is_like, max_bytes):
        if len(run) >= FAN_IN or (len(run) > 1 and _total(run) >= max_bytes / 2):
            return run
    return []


def to_join(entries: Sequence[Entry], max_bytes: int) -> list[Entry]:
    """Return any neighbours that can be put together, or nothing: merged, they describe their sites once."""
    runs = (run for run in _runs(entries, _has_same_window, max_bytes) if len(run) > 1)
    return max(runs, key=len, default=[])


def _runs(entries: Sequence[Entry], belong: Callable[[Entry, Entry], bool], max_bytes: int) -> Iterator[list[Entry]]:
    """Yield the neighbours that belong together, as many at a time as a segment holds."""
    run: list[Entry] = []
    for entry in entries:
        joins = run and belong(run[-1], entry) and _follows(run[-1], entry) and _total(run) + entry.nbytes <= max_bytes
        if not joins:
            yield run
            run = []
        run.append(entry)
    yield run


def _total(entries: Sequence[Entry]) -> int:
    return sum(entry.nbytes for entry in entries)


def _has_same_window(left: Entry, right: Entry) -> bool:
    return left.window == right.window


def _is_like(left: Entry, right: Entry) -> bool:
    return left.window == right.window and left.tier == right.tier


def _follows(left: Entry, right: Entry) -> bool:
    if right.first != left.last + 1:
        return False
    # A later attempt that went back replaces a part of the earlier one. One table could not keep them apart.
    replaced = attempts.replaced_from(right.attempts, max((a.number for a in left.attempts), default=0))
    return replaced is None or replaced >= left.end_step


def plan_windows(entries: Sequence[Entry], budget: int, max_bytes: int) -> list[int]:
    """Return how wide the windows of each segment must become for all of them to fit in `budget` bytes.

    Windows grow in proportion to age, so the resolution of a long run fades, instead of its first steps being ground
    to nothing: the last hour keeps every step while the first day keeps one in a thousand.

    Args:
        entries: The segments, oldest first.
        budget: The bytes that they may have.
        max_bytes: The size of a segment; small neighbours are put together, so few descriptions of sites remain.

    """
    if not entries:
        return []
    now = np.array([entry.window for entry in entries], dtype=np.int64)
    newest = max(entry.end_step for entry in entries)
    fixed = max(entry.fixed_bytes for entry in entries)
    age = np.array([newest - (entry.first_step + entry.end_step) / 2 for entry in entries]).clip(0.5)
    for exponent in np.arange(-np.log2(age.max()), np.log2(MAX_WINDOW), 0.5):
        widths = np.exp2(np.floor(np.log2(age) + exponent).clip(0, np.log2(MAX_WINDOW))).astype(np.int64)
        windows = np.maximum(now, widths)
        chosen = [int(window) for window in windows]
        rows = sum(map(estimate, entries, chosen))
        if rows + fixed * max(1, math.ceil(rows / max_bytes)) <= budget:
            return chosen
    return [MAX_WINDOW] * len(entries)


def _fits(group: Sequence[Entry], window: int, max_bytes: int) -> bool:
    """Return whether segments fit in one after thinning, and in memory before."""
    return _total(group) <= MAX_SEGMENT_BYTES and sum(estimate(entry, window) for entry in group) <= max_bytes


def estimate(entry: Entry, window: int) -> float:
    """Guess how many bytes the rows of a segment will have when it is thinned to a window."""
    rows = entry.nbytes - entry.fixed_bytes
    if window <= entry.window or not entry.num_blocks:
        return rows
    blocks = max(1.0, (entry.end_step - entry.first_step) / window)
    return rows * min(1.0, blocks / entry.num_blocks)


def to_thin(entries: Sequence[Entry], windows: Sequence[int], max_bytes: int) -> list[tuple[list[Entry], int]]:
    """Return which segments to rewrite, with which window; small neighbours are put together on the way."""
    groups: list[tuple[list[Entry], int]] = []
    for entry, window in zip(entries, windows, strict=True):
        if window <= entry.window or entry.num_blocks < 2:
            continue
        group, width = groups[-1] if groups else ([], 0)
        if group and width == window and _follows(group[-1], entry) and _fits([*group, entry], window, max_bytes):
            group.append(entry)
        else:
            groups.append(([entry], window))
    return groups
