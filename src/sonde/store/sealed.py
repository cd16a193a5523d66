"""A safetensors header with a checksum of itself, first of all in its `__metadata__`. Segments and pages have one."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from sonde.errors import RunDamaged

BLANK: Final = "00000000"
"""Stands in the checksum's place while it is computed."""
PREFIX: Final = b'{"__metadata__":{"check":"'
_START: Final = len(PREFIX)
_END: Final = _START + len(BLANK)


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a tensor lies in its file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    crc: int


def fill_in_check(text: bytes) -> bytes:
    """Return a header that begins with `PREFIX` and `BLANK` with its checksum in place."""
    return text[:_START] + _checksum(text) + text[_END:]


def read(path: Path, file: BinaryIO, size: int, *, what: str, max_bytes: int) -> tuple[bytes, int]:
    """Return the header of a file of so many bytes, and where its tensors begin.

    Raises:
        RunDamaged: It is not what was written.

    """
    length = int.from_bytes(file.read(8), "little")
    if not _END < length <= min(max_bytes, size - 8):
        raise RunDamaged(f"{path} is not a {what}: of its {size:,} bytes, {length:,} should be a header.")
    text = file.read(length)
    blanked = text[:_START] + BLANK.encode() + text[_END:]
    if not text.startswith(PREFIX) or text[_START:_END] != _checksum(blanked):
        raise RunDamaged(f"{path}: its header (bytes 8 to {8 + length}) does not match its checksum.")
    return text, 8 + length


def check_no_holes(path: Path, extents: Iterable[tuple[int, int]], start: int, size: int) -> None:
    """Raise RunDamaged unless tensors from byte to byte of the file fill it from `start` to its end, each once."""
    at = start
    for first, last in sorted(extents):
        if first != at or last < first:
            raise RunDamaged(f"{path}: its tensors overlap or leave a hole at byte {min(at, first):,}.")
        at = last
    if at != size:
        raise RunDamaged(f"{path} has {size:,} bytes, but its tensors end at byte {at:,}.")


def _checksum(text: bytes) -> bytes:
    return f"{zlib.crc32(text):08x}".encode()
