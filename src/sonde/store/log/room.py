"""Keep a rank's files within their budget of bytes at every moment, not only once they are thinned."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

_SHARE: Final = 32
_LARGEST_SHARE: Final = 10
_SMALL_SHARE_BYTES: Final = 128 << 10
MOST_LINES_BYTES: Final = 24 << 20
"""The largest file of events or of findings: readers hold it in memory, and read no more than they can hold."""
_WAIT_S: Final = 20.0
"""How long a block waits for the sealer to make room before it is dropped."""


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
