"""Framed records: what the journals of a run and of captured pages are made of, and what can be read back of them.

A record is a 40-byte header and a payload padded to 8 bytes, all little-endian:

    magic 4s | kind u16 | version u16 | step i64 | length u64 | sequence u64 | reserved u32 | crc u32 | payload

`length` counts the padded payload. `crc` is the CRC-32 of the header before it and of the padded payload, so every bit
of a record is checked. `sequence` counts the records of a journal from 0.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from sonde.core import files

MAGIC: Final = b"SNDJ"
VERSION: Final = 1
HEADER: Final = struct.Struct("<4sHHqQQII")
_UNCHECKED: Final = struct.Struct("<4sHHqQQI")  # the header up to its checksum
_CHECKSUM: Final = struct.Struct("<I")
HEADER_TYPE: Final = np.dtype(
    [
        ("magic", "S4"), ("kind", "<u2"), ("version", "<u2"), ("step", "<i8"), ("length", "<u8"),
        ("sequence", "<u8"), ("reserved", "<u4"), ("crc", "<u4"),
    ]
)  # fmt: skip
"""The header in arrays of records."""

# A hostile file could hold a record header every few bytes, each naming a long payload to be checked. Past this many
# checked bytes per byte of the file, the search for the next whole record gives up.
_MAX_WORK: Final = 4

MAX_RECORD: Final = 256 << 20
"""The longest payload of a record that is read."""
_PIECE: Final = 32 << 20
_MAX_SEARCHED: Final = 512 << 20


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


def encode(kind: int, step: int, sequence: int, parts: list[bytes | memoryview]) -> bytes:
    """Return one whole record."""
    size = sum(len(part) for part in parts)
    body = [*parts, bytes(-size % 8)]
    head = _UNCHECKED.pack(MAGIC, kind, VERSION, step, size + len(body[-1]), sequence, 0)
    crc = zlib.crc32(head)
    for part in body:
        crc = zlib.crc32(part, crc)
    return b"".join([head, crc.to_bytes(4, "little"), *body])


def encode_many(kind: int, steps: NDArray[np.int64], sequence: int, records: NDArray[Any]) -> bytes:
    """Return many whole records of one size, whose payloads are filled in already; `head` is of `HEADER_TYPE`."""
    head = records["head"]
    head["magic"], head["kind"], head["version"] = MAGIC, kind, VERSION
    head["step"], head["length"] = steps, records.dtype.itemsize - HEADER.size
    head["sequence"] = np.arange(sequence, sequence + len(records))
    size, before = records.dtype.itemsize, _UNCHECKED.size
    bytes_of_all = bytearray(records.tobytes())
    view = memoryview(bytes_of_all)
    for at in range(0, len(view), size):
        crc = zlib.crc32(view[at + HEADER.size : at + size], zlib.crc32(view[at : at + before]))
        _CHECKSUM.pack_into(view, at + before, crc)
    return bytes(bytes_of_all)


def encode_json(kind: int, sequence: int, plain: Any) -> bytes:
    """Return a record that holds JSON."""
    text = files.dumps(plain)
    # JSON may end in blanks, so the padding needs no length of its own.
    return encode(kind, 0, sequence, [text, b" " * (-len(text) % 8)])


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
    """Yield what `scan` yields, from `start` to the end of a file, holding only a piece of it in memory.

    Once `_MAX_SEARCHED` bytes were read without finding a record, the rest is left alone: a sparse file may claim any
    size.
    """
    size, good, searched = _PIECE, start, 0
    while True:
        file.seek(start)
        piece = file.read(size)
        end = start
        for item in scan(piece, start):
            # Damage that began in an earlier piece is one gap.
            yield Gap(good, item.end) if isinstance(item, Gap) else item
            good = end = item.end
        if len(piece) < size:
            return
        searched = 0 if end > start else searched + len(piece)
        if searched > _MAX_SEARCHED:
            return
        ahead, size = (0, _PIECE) if end > start else _unfinished(piece)
        start = end + ahead


def _unfinished(piece: bytes) -> tuple[int, int]:
    """Return where in a piece without whole records the next search begins, and how many bytes it takes.

    That is at the first record which ends beyond the piece, as far as headers can be believed, or at its end.
    """
    at = piece.find(MAGIC)
    while 0 <= at <= len(piece) - HEADER.size:
        needed = HEADER.size + HEADER.unpack_from(piece, at)[4]
        if len(piece) - at < needed <= MAX_RECORD:
            return at, max(needed, _PIECE)
        at = piece.find(MAGIC, at + 1)
    return len(piece) - HEADER.size + 1, _PIECE


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
