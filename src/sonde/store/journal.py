"""Journals: files that only grow, record by record, and what can be read back from them after any accident."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

from sonde.store import codec
from sonde.store.codec import HEADER, MAGIC

# A hostile file could hold a record header every few bytes, each naming a long payload to be checked. Past this many
# checked bytes per byte of the file, the search for the next whole record gives up.
_MAX_WORK: Final = 4

_PIECE: Final = 64 << 20
_MAX_PIECE: Final = 1 << 30  # no record is longer

_KINDS = frozenset(int(kind) for kind in codec.Kind)


@dataclass(frozen=True, slots=True)
class Record:
    """One whole record, its checksum verified."""

    offset: int
    end: int
    kind: int
    version: int
    step: int
    sequence: int
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Gap:
    """Bytes between two whole records that belong to neither: damage, not an interrupted write."""

    offset: int
    end: int


def scan(buffer: bytes | memoryview, base: int = 0) -> Iterator[Record | Gap]:
    """Yield the whole records of `buffer` and the gaps between them; what follows the last record is the tail.

    Args:
        buffer: The bytes of a journal from offset `base` on.
        base: Added to all offsets.

    """
    view = memoryview(buffer)
    at, budget = 0, _MAX_WORK * len(view) + 1_000_000
    while True:
        record, budget = _read(view, at, base, budget)
        if record is None:
            start = at
            record, budget = _resync(view, at, base, budget)
            if record is None:
                return
            yield Gap(base + start, record.offset)
        yield record
        at = record.end - base


def follow(file: BinaryIO, start: int) -> Iterator[Record | Gap]:
    """Yield what `scan` yields, from `start` to the end of a file, holding only a piece of it in memory."""
    size = _PIECE
    while True:
        file.seek(start)
        piece = file.read(size)
        end = start
        for item in scan(piece, start):
            end = item.end
            yield item
        if len(piece) < size or size > _MAX_PIECE:
            return
        # A piece without a whole record holds the beginning of a long one.
        size = _PIECE if end > start else size * 2
        start = end


def _read(view: memoryview, at: int, base: int, budget: int) -> tuple[Record | None, int]:
    if at + HEADER.size > len(view):
        return None, budget
    magic, kind, version, step, length, sequence, _, crc = HEADER.unpack_from(view, at)
    start = at + HEADER.size
    end = start + length
    if magic != MAGIC or length % 8 or end > len(view):
        return None, budget
    head = zlib.crc32(view[at : start - 4])
    if zlib.crc32(view[start:end], head) != crc:
        return None, budget - length
    return Record(base + at, base + end, kind, version, step, sequence, view[start:end]), budget


def _resync(view: memoryview, at: int, base: int, budget: int) -> tuple[Record | None, int]:
    whole = view.obj if isinstance(view.obj, bytes) and len(view) == len(view.obj) else bytes(view)
    while budget > 0:
        at = whole.find(MAGIC, at + 1)
        if at < 0:
            break
        record, budget = _read(view, at, base, budget - HEADER.size)
        if record is not None:
            return record, budget
    return None, budget


def is_known(record: Record) -> bool:
    """Say whether this version can read the record; later versions may add kinds, which are skipped."""
    return record.kind in _KINDS and record.version <= codec.VERSION
