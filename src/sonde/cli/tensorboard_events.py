"""Event files as TensorBoard reads them: framed records with checksums, each a small protocol buffer.

Many records of one tag are laid out at once, as the rows of a byte array, so that a long curve takes no longer than
writing it. A record is its length, a checksum of the length, the event, and a checksum of the event.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Final

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint32]

_POLYNOMIAL: Final = 0x82F63B78  # Castagnoli's, reflected
_MASK: Final = np.uint32(0xA282EAD8)
_CHUNK: Final = 65_536

# Keys of fields: the number of the field and how it is written.
_TIME, _STEP, _VERSION, _SUMMARY, _VALUE, _TAG = b"\x09", b"\x10", b"\x1a", b"\x2a", b"\x0a", b"\x0a"
_SIMPLE_VALUE, _HISTOGRAM = b"\x15", b"\x2a"
_HISTOGRAM_NUMBERS: Final = (b"\x09", b"\x11", b"\x19", b"\x21", b"\x29")  # min, max, num, sum, sum of squares
_LIMITS, _COUNTS = b"\x32", b"\x3a"


def _make_table() -> Words:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1).astype(np.uint32)
    return table


_TABLE: Final = _make_table()


def crc32c(rows: Bytes) -> Words:
    """Return the checksum of each row.

    >>> hex(int(crc32c(np.frombuffer(b"123456789", np.uint8)[None])[0]))
    '0xe3069283'
    """
    crc = np.full(len(rows), 0xFFFFFFFF, dtype=np.uint32)
    for column in rows.T:
        crc = _TABLE[(crc ^ column) & 0xFF] ^ (crc >> 8)
    return ~crc


def _masked(rows: Bytes) -> Bytes:
    crc = crc32c(rows)
    rotated = (crc >> 15) | (crc << 17)
    return _raw((rotated + _MASK).astype("<u4"))


def _raw(values: NDArray[np.generic]) -> Bytes:
    """Return the bytes of each row of numbers."""
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)


def varint(number: int) -> bytes:
    """Return a number in groups of seven bits, the lowest first."""
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _varints(numbers: NDArray[np.int64], length: int) -> Bytes:
    shifts = 7 * np.arange(length)
    groups = (numbers[:, None] >> shifts) & 0x7F
    groups[:, :-1] |= 0x80
    return groups.astype(np.uint8)


class EventWriter:
    """Writes events to an open file."""

    def __init__(self, file: IO[bytes], time: float) -> None:
        self._file = file
        version = b"brain.Event:2"
        self._put([_TIME, np.array([[time]], "<f8"), _VERSION, varint(len(version)), version], 1)

    def scalars(
        self, tag: str, steps: NDArray[np.int64], times: NDArray[np.float64], values: NDArray[np.float64]
    ) -> None:
        """Write a curve. What is beyond the largest 32-bit float becomes infinite."""
        with np.errstate(over="ignore"):
            singles = values.astype("<f4")[:, None]
        for at in _alike(steps):
            self._events(tag, steps[at], times[at], [_SIMPLE_VALUE, singles[at]])

    def histograms(
        self,
        tag: str,
        steps: NDArray[np.int64],
        times: NDArray[np.float64],
        edges: NDArray[np.float64],
        counts: NDArray[np.float64],
    ) -> None:
        """Write histograms: row i of `counts` has one count between each pair of edges, at step i."""
        middles = (edges[1:] + edges[:-1]) / 2
        full = counts > 0
        low = edges[full.argmax(axis=1)]
        high = edges[len(middles) - full[:, ::-1].argmax(axis=1)]
        # Sums over the middles of the bins: all that counts can tell.
        numbers = (low, high, counts.sum(axis=1), counts @ middles, counts @ middles**2)
        limits = np.broadcast_to(edges[1:], counts.shape)
        for at in _alike(steps):
            fields: list[bytes | NDArray[np.generic]] = []
            for key, column in zip(_HISTOGRAM_NUMBERS, numbers, strict=True):
                fields += [key, column[at].astype("<f8")[:, None]]
            for key, table in ((_LIMITS, limits), (_COUNTS, counts)):
                fields += [key, varint(8 * table.shape[1]), table[at].astype("<f8")]
            size = sum(_width(field) for field in fields)
            self._events(tag, steps[at], times[at], [_HISTOGRAM, varint(size), *fields])

    def _events(
        self, tag: str, steps: NDArray[np.int64], times: NDArray[np.float64], value: list[bytes | NDArray[np.generic]]
    ) -> None:
        name = tag.encode()
        inner: list[bytes | NDArray[np.generic]] = [_TAG, varint(len(name)), name, *value]
        size = sum(map(_width, inner))
        summary: list[bytes | NDArray[np.generic]] = [_VALUE, varint(size), *inner]
        whole = sum(map(_width, summary))
        step = _varints(steps, len(varint(int(steps[-1]))))
        head: list[bytes | NDArray[np.generic]] = [_TIME, times.astype("<f8")[:, None], _STEP, step]
        self._put([*head, _SUMMARY, varint(whole), *summary], len(steps))

    def _put(self, fields: list[bytes | NDArray[np.generic]], count: int) -> None:
        event = np.concatenate([_column(field, count) for field in fields], axis=1)
        length = np.full((count, 1), event.shape[1], "<u8")
        frame = [_raw(length), _masked(_raw(length)), event, _masked(event)]
        self._file.write(np.concatenate(frame, axis=1).tobytes())


def _width(field: bytes | NDArray[np.generic]) -> int:
    return len(field) if isinstance(field, bytes) else field.shape[1] * field.itemsize


def _column(field: bytes | NDArray[np.generic], count: int) -> Bytes:
    if isinstance(field, bytes):
        return np.broadcast_to(np.frombuffer(field, np.uint8), (count, len(field)))
    return _raw(field)


def _alike(steps: NDArray[np.int64]) -> Iterator[slice]:
    """Yield stretches of rising steps that take as many bytes each: their records have one layout."""
    lengths = np.array([len(varint(int(step))) for step in steps])
    for length in np.unique(lengths):
        first, last = np.searchsorted(lengths, [length, length + 1])
        for start in range(int(first), int(last), _CHUNK):
            yield slice(start, min(start + _CHUNK, int(last)))
