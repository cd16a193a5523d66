"""The header that makes a page a sealed file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from sonde import strict_json
from sonde.errors import RunDamaged
from sonde.store import sealed
from sonde.store.pages import dtypes
from sonde.store.pages.record import FORMAT, Entry, parse
from sonde.store.sealed import Extent, SealedFile


class Header:
    """A header that grows with its page. It knows its length before it is written."""

    def __init__(self, rank: int) -> None:
        told = {"format": FORMAT.name, "schema_version": str(FORMAT.version), "rank": str(rank)}
        self._head = sealed.open_metadata(told) + b',"datapoints":"['
        self._datapoints: list[bytes] = []
        self._tensors: list[bytes] = []
        self.num_tensors = 0
        self.size = 8 + len(self._head) + len(b']"') + len(b"}}")

    def add(self, item: Item) -> None:
        """Take in a datapoint."""
        self.size += item.size
        self.num_tensors += item.num_tensors
        self._datapoints.append(item.datapoint)
        self._tensors.append(item.tensors)

    def render(self, reserved: int) -> bytes:
        """Return the first `reserved` bytes of the page."""
        metadata = b"".join([self._head, b",".join(self._datapoints), b']"'])
        return sealed.render(metadata, self._tensors, reserved)


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
    entries = [sealed.entry(*tensor) for tensor in tensors]
    return Item(json.dumps(text)[1:-1].encode(), b"".join(entries), len(tensors))


def read(path: Path, file: BinaryIO) -> tuple[list[Entry], int]:
    """Read a page's header.

    Returns:
        Its datapoints, and where its tensors begin.

    Raises:
        RunDamaged: It is not what was written.

    """
    page = SealedFile.read(path, file, FORMAT)
    text = page.metadata.get("datapoints", "").encode("utf-8", "surrogatepass")
    listed = strict_json.decode(text, list[Any], f"{path}: its datapoints", "a list")
    entries = [parse(plain, "", f"{path}: datapoint {at}") for at, plain in enumerate(listed)]
    _compare(path, entries, page)
    return entries, page.start


def _compare(path: Path, entries: list[Entry], page: SealedFile) -> None:
    """Raise RunDamaged unless the header tells other programs what it tells us."""
    for place in (place for entry in entries for place in entry.places):
        dtype, shape = dtypes.to_safetensors(place.dtype, place.shape)
        if page.tensors.get(place.name) != Extent(dtype, shape, place.start, place.end):
            raise RunDamaged(f"{path}: it describes the tensor {place.name!r:.80} in two ways.")
