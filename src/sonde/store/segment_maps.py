"""The segments of a reader that are mapped to memory, and how to tell that a file is still the same."""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from sonde.store.table import Table

if TYPE_CHECKING:
    from sonde.store.segment import Segment


@dataclass(frozen=True, slots=True)
class Stamp:
    """Tells whether a file is still the same one."""

    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, stat: os.stat_result) -> Stamp:
        """Return the stamp of a file."""
        return cls(stat.st_ino, stat.st_size, stat.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class Mapped:
    """A segment in memory. The file is read as its arrays are touched."""

    segment: Segment
    rows: Table
    whole: mmap.mmap


class Maps:
    """The mapped segments that were used last. Each holds a file open, and a process may hold only so many."""

    def __init__(self, limit: int = 192) -> None:
        self._limit = limit
        self._mapped: OrderedDict[int, Mapped] = OrderedDict()
        self._lock = Lock()

    def get(self, segment: Segment) -> Mapped:
        """Return a mapped segment, mapping it if it is not."""
        with self._lock:
            entry = self._mapped.get(id(segment))
            if entry is not None:
                self._mapped.move_to_end(id(segment))
                return entry
            entry = segment.map()
            self._mapped[id(segment)] = entry
            if len(self._mapped) > self._limit:
                self._mapped.popitem(last=False)
            return entry

    def widen(self, limit: int) -> None:
        """Allow more maps: those of a run whose segments are replaced faster than they can be mapped again."""
        self._limit = max(self._limit, limit)

    def drop(self, segment: Segment) -> None:
        """Let go of a segment that is read no more."""
        with self._lock:
            self._mapped.pop(id(segment), None)
