"""What a sealer knows about the segments of its folder, and which of them belong together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from sonde.store import attempts
from sonde.store.attempts import Attempt
from sonde.store.segment import Segment

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
    """Return any neighbours that can be put together, or nothing: to save what each says about its sites."""
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
    # A later attempt that went back replaces a part of the earlier one. In one table that could not be told any more.
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
    """Say whether segments fit in one when they are thinned, and in memory before."""
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
