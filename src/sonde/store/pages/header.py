"""The header that makes a page an ordinary safetensors file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from sonde import strict_json
from sonde.errors import RunDamaged
from sonde.store import sealed
from sonde.store.pages import dtypes
from sonde.store.pages.record import FORMAT, VERSION, Entry, Place, parse

MAX_BYTES: Final = strict_json.MAX_BYTES
_CLOSE: Final = b'"}'


class Header:
    """A header that grows with its page. It knows its length before it is written."""

    def __init__(self, rank: int) -> None:
        head = {"format": FORMAT, "schema_version": str(VERSION), "rank": str(rank)}
        told = json.dumps(head, separators=(",", ":"))[1:-1]
        self._head = sealed.PREFIX + f'{sealed.BLANK}",{told},"datapoints":"'.encode()
        self._datapoints: list[bytes] = []
        self._tensors: list[bytes] = []
        self.num_tensors = 0
        self.size = 8 + len(self._head) + len(b"[]") + len(_CLOSE) + len(b"}")

    def add(self, item: Item) -> None:
        """Take in a datapoint."""
        self.size += item.size
        self.num_tensors += item.num_tensors
        self._datapoints.append(item.datapoint)
        self._tensors.append(item.tensors)

    def render(self, reserved: int) -> bytes:
        """Return the first `reserved` bytes of the page."""
        parts = [self._head, b"[", b",".join(self._datapoints), b"]", _CLOSE, *self._tensors, b"}"]
        text = b"".join(parts)
        if 8 + len(text) > reserved:
            raise RunDamaged(f"A header of {len(text):,} bytes does not fit the {reserved:,} that its page reserved.")
        text = sealed.fill_in_check(text + b" " * (reserved - 8 - len(text)))
        return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True, slots=True)
class Item:
    """What the header says about one datapoint."""

    datapoint: bytes
    tensors: bytes
    num_tensors: int

    @property
    def size(self) -> int:
        """How much it takes in a header, with the comma before it."""
        return len(self.datapoint) + len(self.tensors) + 1


def make_item(text: str, tensors: list[tuple[str, str, tuple[int, ...], int, int]]) -> Item:
    """Describe a datapoint.

    Args:
        text: Its JSON, which becomes a part of a string in the header.
        tensors: Name, type, shape, and where the bytes begin and end, counted from the end of the header.

    """
    entries = [
        f',{json.dumps(name)}:{{"dtype":"{dtype}","shape":{_compact(shape)},"data_offsets":[{start},{end}]}}'
        for name, dtype, shape, start, end in tensors
    ]
    return Item(json.dumps(text)[1:-1].encode(), "".join(entries).encode(), len(tensors))


def _compact(shape: tuple[int, ...]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"


def read(path: Path, file: BinaryIO, size: int) -> tuple[list[Entry], int]:
    """Read a page's header.

    Returns:
        Its datapoints, and where its tensors begin.

    Raises:
        RunDamaged: It is not what was written.

    """
    text, start = sealed.read(path, file, size, what="page", max_bytes=MAX_BYTES)
    plain = strict_json.loads(text, f"{path}: its header")
    metadata = plain.pop("__metadata__", None) if isinstance(plain, dict) else None
    entries = _entries(path, metadata)
    _compare(path, entries, plain, start, size)
    return entries, start


def _entries(path: Path, metadata: Any) -> list[Entry]:
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise RunDamaged(f"{path} is not a page of captures.")
    check_version(metadata.get("schema_version"), str(path))
    listed = strict_json.loads(str(metadata.get("datapoints", "")).encode(), f"{path}: its datapoints")
    if not isinstance(listed, list):
        raise RunDamaged(f"{path}: its datapoints are no list.")
    return [parse(plain, "", f"{path}: datapoint {at}") for at, plain in enumerate(listed)]


def check_version(version: object, where: str) -> None:
    """Raise RunDamaged if a page is of a later version."""
    if not str(version).isdecimal() or not 1 <= int(str(version)[:9]) <= VERSION:
        raise RunDamaged(f"{where} has page version {version!r:.40}; this Sonde reads 1 to {VERSION}. Update it.")


def _compare(path: Path, entries: list[Entry], plain: dict[str, Any], start: int, size: int) -> None:
    """Hold what the header tells other programs against what it tells us; no byte may be left over."""
    extents = []
    for name, tensor in plain.items():
        offsets = tensor.get("data_offsets") if isinstance(tensor, dict) else None
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(each) is int for each in offsets):
            raise RunDamaged(f"{path}: its header describes the tensor {name!r:.80} as {tensor!r:.150}.")
        extents.append((start + offsets[0], start + offsets[1]))
    sealed.check_no_holes(path, extents, start, size)
    for place in (place for entry in entries for place in entry.places):
        _compare_place(path, place, plain.get(place.name), start)


def _compare_place(path: Path, place: Place, told: Any, start: int) -> None:
    dtype, shape = dtypes.to_safetensors(place.dtype, place.shape)
    expected = {"dtype": dtype, "shape": list(shape), "data_offsets": [place.start - start, place.end - start]}
    if told != expected:
        raise RunDamaged(f"{path}: it describes the tensor {place.name!r:.80} in two ways.")
