"""Read one page: its index or journal lists its datapoints, and its tensors are read on demand."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from sonde.core import files
from sonde.errors import RunDamaged
from sonde.store import framing, sealed
from sonde.store.framing import HEADER
from sonde.store.pages import dtypes, names, nodes, preview, record
from sonde.store.pages.open_page import read_header
from sonde.store.pages.record import Datapoint, Entry, Kind, Place

_MAX_LOOKS: Final = 5

Restore = Callable[[NDArray[Any], str], Any]
"""Makes a tensor of an array and the type it had."""


@dataclass(slots=True, eq=False)
class Page:
    """A page, sealed or not. Its files may be renamed at any time by the writer."""

    folder: Path
    number: int
    problems: list[str] = field(default_factory=list)
    is_whole: bool = False
    """Whether all records are known: an index ends with a record of its own."""
    _end: int = 0

    def refresh(self) -> Iterator[tuple[Datapoint, int]]:
        """Yield the datapoints that are new, and where their records begin."""
        if self.is_whole:
            return
        try:
            file = self._open(names.INDEX, names.JOURNAL)
        except FileNotFoundError:
            # Lost, or renamed to nothing: the page itself may tell.
            if not names.page_file(self.folder, self.number, names.SEALED).exists():
                raise RunDamaged(f"{self._name()}: there is neither an index nor a journal.") from None
            return
        with file:
            table = _read_table(file) if not self._end else None
            if table is None:
                yield from self._follow(file)
            else:
                self.is_whole = True
                yield from table

    def _follow(self, file: Any) -> Iterator[tuple[Datapoint, int]]:
        damaged = False
        for item in framing.follow(file, self._end):
            where = f"{file.name} at byte {item.offset}"
            self._end = item.end
            if isinstance(item, framing.Gap):
                damaged = True
                self.problems.append(f"{where}: {item.end - item.offset} bytes are damaged.")
            elif item.kind == Kind.PAGE:
                record.read_start(item.payload, where)
            elif item.kind == Kind.DATAPOINT:
                yield record.read_key(item, where), item.offset
            elif item.kind == Kind.END:
                self.is_whole = not damaged

    def read_header(self) -> list[Entry]:
        """Return the datapoints that the page itself lists: its index was lost or cut, and it can do without."""
        path = names.page_file(self.folder, self.number, names.SEALED)
        with files.open_file(path) as file:
            entries, _ = read_header(path, file)
        self.is_whole = True
        return entries

    def entry(self, datapoint: Datapoint, at: int) -> Entry:
        """Read the record of a datapoint, which begins at a byte of the index; if that is damaged, ask the page."""
        try:
            return self._entry_at(at)
        except (RunDamaged, FileNotFoundError) as error:
            if not names.page_file(self.folder, self.number, names.SEALED).exists():
                raise RunDamaged(str(error)) from None
            found = {each.datapoint: each for each in self.read_header()}
            if datapoint not in found:
                raise RunDamaged(str(error)) from None
            return found[datapoint]

    def _entry_at(self, at: int) -> Entry:
        with self._open(names.INDEX, names.JOURNAL) as file:
            where = f"{file.name} at byte {at}"
            found = _record_at(file, at)
        if found is None:
            raise RunDamaged(f"{where}: the record of a datapoint is not what it was.")
        return record.decode(found.payload, where)

    def decode(self, entry: Entry, node: Any, restore: Restore | None) -> Any:
        """Return the value of a node."""
        try:
            return nodes.Decoder(lambda number: self._tensor(entry, number, restore), _batch_of(entry)).decode(node)
        except nodes.BadNode as error:
            raise RunDamaged(f"{self._name()}: the record of {entry.datapoint!r:.80} makes no sense: {error}") from None

    def preview(self, entry: Entry, number: int) -> preview.Preview:
        """Return the preview of a tensor; measured anew only if it was lost."""
        place = entry.places[number]
        dtype = place.described if isinstance(place.described, str) else str(place.dtype)
        if entry.previews is None:
            return preview.measure(self._array(place))
        found = preview.unpack(entry.previews[number], place.shape, dtype)
        if found is None:
            raise RunDamaged(f"{self._name()}: the preview of {place.name!r:.80} makes no sense.")
        return found

    def read_raw(self, place: Place) -> memoryview:
        """Read the bytes of a tensor, and check them.

        Raises:
            RunDamaged: They are not what was written.

        """
        with self._open(names.SEALED, names.OPEN) as file:
            return read_content(file, place)

    def _array(self, place: Place) -> NDArray[Any]:
        if not place.nbytes:
            return np.empty(place.shape, place.dtype)
        content = np.frombuffer(self.read_raw(place), np.uint8)
        if place.dtype.fields is None and place.dtype.byteorder == ">":
            return content.view(place.dtype.newbyteorder("<")).astype(place.dtype).reshape(place.shape)
        return content.view(place.dtype).reshape(place.shape)

    def _tensor(self, entry: Entry, number: int, restore: Restore | None) -> Any:
        if number >= len(entry.places):
            raise nodes.BadNode(f"there is no tensor {number}")
        place = entry.places[number]
        array = self._array(place)
        if place.origin == nodes.LIST:
            return array.tolist()
        if place.origin == nodes.BYTES:
            return array.tobytes()
        if place.origin == nodes.TEXT:
            return array.tobytes().decode("utf-8", "surrogatepass")
        if place.origin.startswith(dtypes.TORCH) and restore is not None:
            return restore(array, place.origin)
        return array

    def _name(self) -> Path:
        return names.page_file(self.folder, self.number, "*")

    def _open(self, *suffixes: str) -> Any:
        """Open the first of these files that is there, and look again if it was renamed meanwhile."""
        for _ in range(_MAX_LOOKS):
            for suffix in suffixes:
                try:
                    return files.open_file(names.page_file(self.folder, self.number, suffix), buffering=0)
                except FileNotFoundError:
                    continue
        raise FileNotFoundError(f"{self._name()} is gone")


def _batch_of(entry: Entry) -> tuple[int | str, ...]:
    """Return the samples of the batch that a datapoint came in, where that is noted."""
    try:
        listed = nodes.find_node(entry.info, (record.BATCH,))
    except KeyError:
        return ()
    return tuple(each for each in listed if type(each) in (int, str)) if isinstance(listed, list) else ()


def read_content(file: BinaryIO, place: Place) -> memoryview:
    """Read the bytes of a tensor from its page, and check them.

    Raises:
        RunDamaged: They are not what was written.

    """
    return sealed.read_tensor(file, place.name, place.start, place.end, place.crc)


def _read_table(file: Any) -> list[tuple[Datapoint, int]] | None:
    """Return where the records of an index begin, from its last record; None if it is not finished, or damaged."""
    size = file.seek(0, 2)
    if size < 8:
        return None
    file.seek(size - 8)
    at = int.from_bytes(file.read(8), "little")
    if not 0 < at < size - HEADER.size:
        return None
    found = _record_at(file, at)
    if found is None or found.kind != Kind.END or found.end != size:
        return None
    return record.read_end(found.payload, f"{file.name} at byte {at}")


def _record_at(file: Any, at: int) -> framing.Record | None:
    size = os.fstat(file.fileno()).st_size
    file.seek(at)
    head = file.read(HEADER.size)
    if len(head) < HEADER.size:
        return None
    length = HEADER.unpack(head)[4]
    if length > size - at:
        return None
    file.seek(at)
    for found in framing.scan(file.read(HEADER.size + length), at):
        return found if isinstance(found, framing.Record) and found.offset == at else None
    return None
