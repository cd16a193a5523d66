"""Follow a journal while it grows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from sonde.core import files
from sonde.errors import RunDamaged
from sonde.records import Site
from sonde.store import framing
from sonde.store.log import attempts, codec, sites, table
from sonde.store.log.attempts import Attempt
from sonde.store.log.codec import Kind, Packed
from sonde.store.log.table import Table

_MAX_WAITING_BYTES: Final = 64 << 20
_KINDS: Final = frozenset(int(kind) for kind in Kind)


def is_known(record: framing.Record) -> bool:
    """Return whether this version can read the record; later versions may add kinds, which are skipped."""
    return record.kind in _KINDS and record.version <= framing.VERSION


class JournalSource:
    """Follows a journal: each `refresh` reads the records added since the last."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode = self._size = 0
        self._begin()

    def _begin(self) -> None:
        self.end = 0
        """Where the last whole record ends."""
        self.sites: dict[int, Site] = {}
        self.problems: list[str] = []
        self.tables: list[Table] = []
        self._stated: list[Attempt] = []

    @property
    def first_step(self) -> int | None:
        """The first step of any row."""
        return min((int(part.blocks.step[0]) for part in self.tables if len(part.blocks)), default=None)

    @property
    def attempts(self) -> list[Attempt]:
        """The attempt that wrote it."""
        return attempts.resolve(self._stated, self.first_step)

    def refresh(self) -> bool:
        """Read what is new; return whether there was anything."""
        try:
            opened = files.open_file(self.path)
        except RunDamaged as error:  # such as a pipe in its place
            self.problems = [str(error)]
            return False
        with opened as file:
            stat = os.fstat(file.fileno())
            if self._inode not in (0, stat.st_ino) or stat.st_size < self.end:
                self._begin()  # another file took its name
            if (stat.st_ino, stat.st_size) == (self._inode, self._size):
                return False
            self._inode, self._size = stat.st_ino, stat.st_size
            before, packed, waiting = self.end, list[Packed](), 0
            for item in framing.follow(file, self.end):
                if isinstance(item, framing.Gap):
                    self.problems.append(f"{self.path}: bytes {item.offset} to {item.end} are damaged")
                    continue
                self.end = item.end
                if is_known(item):
                    self._take(item, packed)
                waiting += item.end - item.offset
                if waiting > _MAX_WAITING_BYTES:  # the blocks still hold on to what was read
                    self._add(packed)
                    packed, waiting = [], 0
        self._add(packed)
        return self.end > before

    def _take(self, record: framing.Record, packed: list[Packed]) -> None:
        where = f"{self.path} at byte {record.offset}"
        try:
            if record.kind == Kind.BLOCK:
                packed.append(codec.decode_block(record.step, record.payload))
            elif record.kind == Kind.SITES:
                self.sites.update((site.id, site) for site in sites.parse(record.payload, where))
            else:
                self._stated.append(attempts.parse(record.payload, where))
        except codec.BadPayload as error:
            self.problems.append(f"{where}: {error}")
        except RunDamaged as error:
            self.problems.append(str(error))

    def _add(self, packed: list[Packed]) -> None:
        if not packed:
            return
        # Each table at least twice as long as the next, so following a run costs a logarithm of merges.
        self.tables.append(table.from_blocks(packed))
        while len(self.tables) > 1 and len(self.tables[-2]) < 2 * len(self.tables[-1]):
            self.tables[-2:] = [table.merge(self.tables[-2:])]
