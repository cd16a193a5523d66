"""What a sealer knows about the segments of its folder, and which of them belong together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sonde.store import attempts
from sonde.store.attempts import Attempt
from sonde.store.segment import Segment

FAN_IN: Final = 8
"""This many small neighbours of like size become one."""
_SMALLEST_TIER: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Entry:
    """A segment, without what it holds."""

    first: int
    last: int
    name: str
    nbytes: int
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
    run: list[Entry] = []
    for entry in [*entries, None]:
        if entry is not None and run and _joins(run[-1], entry) and _total(run) + entry.nbytes <= max_bytes:
            run.append(entry)
            continue
        if len(run) >= FAN_IN or (len(run) > 1 and _total(run) >= max_bytes / 2):
            return run
        run = [entry] if entry is not None else []
    return []


def _total(entries: Sequence[Entry]) -> int:
    return sum(entry.nbytes for entry in entries)


def _joins(left: Entry, right: Entry) -> bool:
    if right.first != left.last + 1 or left.window != right.window or left.tier != right.tier:
        return False
    # A later attempt that went back replaces a part of the earlier one. In one table that could not be told any more.
    replaced = attempts.replaced_from(right.attempts, max((a.number for a in left.attempts), default=0))
    return replaced is None or replaced >= left.end_step


def to_thin(entries: Sequence[Entry]) -> Entry | None:
    """Return the segment to thin next, or None if none can be.

    The one whose age is largest for the width of its windows: the resolution of a long run fades with age, instead of
    the first steps being ground to nothing.
    """
    able = [entry for entry in entries if entry.num_blocks > 1]
    newest = max((entry.end_step for entry in able), default=0)
    return max(able, key=lambda entry: (newest - entry.first_step) / entry.window, default=None)
