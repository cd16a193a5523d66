"""Sealed files: ordinary safetensors files of which every byte is checked. Segments and pages are sealed files.

    length u64 | header: JSON, padded with blanks | tensors, one after the other, without holes

The header's `__metadata__` begins with `check`, the CRC-32 of the header with zeros in its own place. The checksums of
the tensors lie elsewhere in the metadata, each format in its own way.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from sonde.core import files
from sonde.core.files import Natural
from sonde.errors import RunDamaged
from sonde.store.remote import mirror

ITEM_BYTES: Final = {
    "BOOL": 1, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
"""Bytes of one element, by what safetensors calls its type."""

_BLANK: Final = "00000000"  # in place of the checksum while it is computed
_PREFIX: Final = b'{"__metadata__":{"check":"'
_START: Final = len(_PREFIX)
_END: Final = _START + len(_BLANK)
_WRITE_BYTES: Final = 1 << 30  # the most that one call of the system takes


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of sealed file."""

    name: str
    """Its `format` in the metadata."""
    what: str
    """What such a file is, in words."""
    version: int
    """The newest version that can be read."""
    max_header_bytes: int

    def check_version(self, version: object, where: str) -> None:
        """Raise RunDamaged unless the version can be read."""
        if not str(version).isdecimal() or not 1 <= int(str(version)[:9]) <= self.version:
            raise RunDamaged(
                f"{where} is a {self.what} of version {version!r:.40}; this Sonde reads 1 to {self.version}. Update it."
            )


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a tensor lies in its file, and what it is."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class _Tensor(msgspec.Struct):
    """A tensor as the header of any safetensors file describes it."""

    dtype: str
    shape: tuple[Natural, ...]
    data_offsets: tuple[Natural, Natural]


@dataclass(frozen=True, slots=True)
class SealedFile:
    """The header of a sealed file, checked against itself and the size of the file."""

    metadata: dict[str, str]
    tensors: dict[str, Extent]
    start: int
    """Where the tensors begin."""

    @classmethod
    def read(cls, path: Path, file: BinaryIO, kind: Format) -> SealedFile:
        """Read the header of a file.

        Raises:
            RunDamaged: It does not match its checksum, or is inconsistent.

        """
        size = os.fstat(file.fileno()).st_size
        mirror.need(path, 0, 8)
        text, start = _read_header(path, file, size, kind)
        plain = files.loads(text, f"{path}: its header")
        metadata = plain.pop("__metadata__", None) if isinstance(plain, dict) else None
        if not isinstance(metadata, dict) or metadata.get("format") != kind.name:
            raise RunDamaged(f"{path} is not a {kind.what}.")
        kind.check_version(metadata.get("schema_version"), str(path))
        metadata = files.convert(metadata, dict[str, str], f"{path}: its metadata", "text by name")
        tensors = {name: _extent(path, name, entry, start) for name, entry in plain.items()}
        _check_no_holes(path, tensors.values(), start, size)
        return cls(metadata, tensors, start)


def _read_header(path: Path, file: BinaryIO, size: int, kind: Format) -> tuple[bytes, int]:
    """Return the header, once its checksum is right, and where it ends."""
    length = int.from_bytes(file.read(8), "little")
    if not _END < length <= min(kind.max_header_bytes, size - 8):
        raise RunDamaged(f"{path} is not a {kind.what}: of its {size:,} bytes, {length:,} should be a header.")
    mirror.need(path, 8, 8 + length)
    file.seek(8)
    text = file.read(length)
    blanked = text[:_START] + _BLANK.encode() + text[_END:]
    if not text.startswith(_PREFIX) or text[_START:_END] != _checksum(blanked):
        raise RunDamaged(f"{path}: its header (bytes 8 to {8 + length}) does not match its checksum.")
    return text, 8 + length


def _extent(path: Path, name: str, entry: Any, start: int) -> Extent:
    tensor = files.convert(entry, _Tensor, f"{path}: its header, at {name!r:.80},", "a tensor")
    first, last = tensor.data_offsets
    if math.prod(tensor.shape) * ITEM_BYTES.get(tensor.dtype, -1) != last - first:
        raise RunDamaged(f"{path}: its header describes the tensor {name!r:.80} as {entry!r:.150}, which cannot be.")
    return Extent(tensor.dtype, tensor.shape, start + first, start + last)


def _check_no_holes(path: Path, extents: Iterable[Extent], start: int, size: int) -> None:
    """Raise RunDamaged unless the tensors fill the file from `start` to its end, each byte once."""
    at = start
    for first, last in sorted((extent.start, extent.end) for extent in extents):
        if first != at:
            raise RunDamaged(f"{path}: its tensors overlap or leave a hole at byte {min(at, first):,}.")
        at = last
    if at != size:
        raise RunDamaged(f"{path} has {size:,} bytes, but its tensors end at byte {at:,}.")


def read_tensor(file: BinaryIO, name: str, start: int, end: int, crc: int) -> memoryview:
    """Read the bytes of one tensor, and check them.

    Raises:
        RunDamaged: They are not what was written.

    """
    size = os.fstat(file.fileno()).st_size
    # Checked before memory is allocated: a hostile file may name any size.
    if end > size:
        raise RunDamaged(f"{file.name} has {size:,} bytes; {name!r:.80} should end at {end:,}.")
    mirror.need(file.name, start, end)
    content = np.empty(end - start, np.uint8)
    view = content.data
    file.seek(start)
    while len(view):
        read = file.readinto(view)  # type: ignore[attr-defined]
        if not read:
            raise RunDamaged(f"{file.name} was cut short while {name!r:.80} was read.")
        view = view[read:]
    if zlib.crc32(content.data) != crc:
        raise RunDamaged(bad_checksum(file.name, name, start, end))
    return content.data


def bad_checksum(path: str | Path, name: str, start: int, end: int) -> str:
    """Describe a tensor whose bytes are not what was written."""
    return f"{path}: the tensor {name!r:.80} (bytes {start} to {end}) does not match its checksum"


def open_metadata(fields: Mapping[str, str]) -> bytes:
    """Return the beginning of a header: its metadata, not yet closed."""
    return _PREFIX + f'{_BLANK}",{compact(dict(fields))[1:-1]}'.encode()


def entry(name: str, dtype: str, shape: tuple[int, ...], start: int, end: int) -> bytes:
    """Return a header's description of a tensor; `start` and `end` count from the end of the header."""
    described = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    return f",{json.dumps(name)}:{compact(described)}".encode()


def render(metadata: bytes, entries: Iterable[bytes], room: int | None = None) -> bytes:
    """Return a whole header with its length before it, padded to `room` bytes or else to a multiple of eight."""
    text = b"".join([metadata, b"}", *entries, b"}"])
    if room is not None and 8 + len(text) > room:
        raise RunDamaged(f"A header of {len(text):,} bytes does not fit the {room:,} that its page reserved.")
    text += b" " * (-len(text) % 8 if room is None else room - 8 - len(text))
    return len(text).to_bytes(8, "little") + text[:_START] + _checksum(text) + text[_END:]


def compact(value: Any) -> str:
    """Return a value as JSON without blanks."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def write_all(fd: int, part: bytes | memoryview) -> None:
    """Write all bytes, however many calls that takes."""
    view = memoryview(part)
    while len(view):
        view = view[os.write(fd, view[:_WRITE_BYTES]) :]


def raw(array: NDArray[Any]) -> memoryview:
    """Return the bytes of an array."""
    # A view with a zero in its shape or its items cannot be cast.
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.nbytes else memoryview(b"")


def _checksum(text: bytes) -> bytes:
    return f"{zlib.crc32(text):08x}".encode()
