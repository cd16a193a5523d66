"""Reading pages: an index in memory, everything else when it is asked for."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, Final, Literal

import numpy as np
from numpy.typing import NDArray

from sonde.errors import RunDamaged, RunNotFound
from sonde.store import journal
from sonde.store.codec import HEADER
from sonde.store.pages import header, names, nodes, preview, record
from sonde.store.pages.as_torch import to_torch
from sonde.store.pages.file import read_start
from sonde.store.pages.record import Datapoint, Entry, Kind, Place

_MAX_LOOKS: Final = 5

Restore = Callable[[NDArray[Any], str], Any]


def load_debug_outputs(folder: str | Path, *, tensors: Literal["numpy", "torch"] = "numpy") -> DebugOutputs:
    """Open what was captured into a folder (`epoch_4/debugger`), also while it is written.

    Args:
        folder: Holds pages.
        tensors: What torch tensors come back as. Numpy arrays are always numpy arrays.

    Raises:
        RunNotFound: There is no such folder.

    """
    path = Path(folder)
    if not path.is_dir():
        raise RunNotFound(f"There is no folder {path}. Captures lie in `debugger` or `epoch_N/debugger` of a run.")
    return DebugOutputs(path, restore=to_torch if tensors == "torch" else None)


class DebugOutputs(Mapping[Datapoint, Mapping[str, Any]]):
    """Captures by datapoint: `outputs[17]["features"]`.

    Only an index is held in memory. `outputs[17]` reads the structure of one datapoint, `outputs[17]["features"]` the
    tensors of one debugger, and `outputs.tensor(17, "features", "layer1/0")` one tensor. Datapoints come in order:
    numbers first, then names. Of two captures of one datapoint the later counts.
    """

    def __init__(self, folder: Path, *, restore: Restore | None = None, ranks: bool = True) -> None:
        self.folder = folder
        self.problems: list[str] = []
        """What could not be read; everything else can."""
        self._restore = restore
        self._ranks = ranks
        self._lock = Lock()
        self._pages: dict[tuple[Path, int], _Page] = {}
        self._where: dict[Datapoint, tuple[_Page, int | Entry]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Take in what was written since."""
        with self._lock:
            self.problems = []
            for folder in names.rank_folders(self.folder) if self._ranks else [self.folder]:
                for page in names.list_pages(folder):
                    self._take(folder, page)
            ordered = sorted(self._where.items(), key=lambda item: (isinstance(item[0], str), item[0]))
            self._where = dict(ordered)

    def __getitem__(self, datapoint: Datapoint) -> Mapping[str, Any]:
        """Return the outputs of a datapoint, by debugger.

        Raises:
            KeyError: Nothing was captured for it.
            RunDamaged: Its record cannot be read.

        """
        page, entry = self._entry(datapoint)
        return _Outputs(page, entry, self._restore)

    def __iter__(self) -> Iterator[Datapoint]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, datapoint: object) -> bool:
        return datapoint in self._where

    def __repr__(self) -> str:
        return f"<DebugOutputs of {len(self)} datapoints in {len(self._pages)} pages at {self.folder}>"

    def tensor(self, datapoint: Datapoint, debugger: str, path: str | Sequence[str | int] = "") -> Any:
        """Read one tensor, or any other part of a debugger's output, and nothing else.

        Args:
            datapoint: Its number or name.
            debugger: The name of the debugger.
            path: Where in the output: `"layer1/0"` or `("layer1", 0)`. Nothing means all of it.

        Raises:
            KeyError: There is no such part.
            RunDamaged: It cannot be read.

        """
        page, entry = self._entry(datapoint)
        keys = nodes.from_text(path) if isinstance(path, str) else tuple(path)
        try:
            node = nodes.find(entry.outputs[debugger], keys)
        except KeyError:
            known = [_label(name, where) for name, where, _ in _tensors(entry)]
            raise KeyError(
                f"{datapoint!r} has no {_label(debugger, keys)!r}; its tensors: {', '.join(known)}"
            ) from None
        return page.decode(entry, node, self._restore)

    def previews(self, datapoint: Datapoint) -> dict[str, dict[str, preview.Preview]]:
        """Return previews of a datapoint's tensors, by debugger and path. Opens no page."""
        page, entry = self._entry(datapoint)
        found: dict[str, dict[str, preview.Preview]] = {name: {} for name in entry.outputs}
        for debugger, path, number in _tensors(entry):
            found[debugger][nodes.to_text(path)] = page.preview(entry, number)
        return found

    def info(self, datapoint: Datapoint) -> dict[str, Any]:
        """Return what was noted about a datapoint when it was captured."""
        page, entry = self._entry(datapoint)
        value = page.decode(entry, entry.info, self._restore)
        return value if isinstance(value, dict) else {}

    def entry(self, datapoint: Datapoint) -> tuple[Entry, Callable[[Place], memoryview]]:
        """Return a datapoint as it is stored, and what reads its tensors as bytes."""
        page, entry = self._entry(datapoint)
        return entry, page.read_raw

    def _entry(self, datapoint: Datapoint) -> tuple[_Page, Entry]:
        page, where = self._where[datapoint]
        return page, where if isinstance(where, Entry) else page.entry(datapoint, where)

    def _take(self, folder: Path, files: names.Page) -> None:
        page = self._pages.setdefault((folder, files.number), _Page(folder, files.number))
        try:
            for datapoint, where in page.refresh():
                self._where[datapoint] = (page, where)
            if files.is_sealed and not page.is_whole:
                for entry in {each.datapoint: each for each in page.read_header()}.values():
                    if not _is_found(self._where.get(entry.datapoint), page):
                        self._where[entry.datapoint] = (page, entry)
        except (RunDamaged, OSError) as error:
            if str(error) not in page.problems:
                page.problems.append(str(error))
        self.problems += page.problems


def _is_found(known: tuple[_Page, int | Entry] | None, page: _Page) -> bool:
    return known is not None and known[0] is page


def _label(debugger: str, path: nodes.Path) -> str:
    return "/".join([debugger, nodes.to_text(path)]) if path else debugger


def _tensors(entry: Entry) -> Iterator[tuple[str, nodes.Path, int]]:
    for debugger, node in entry.outputs.items():
        for path, number in nodes.tensors(node):
            if type(number) is int and 0 <= number < len(entry.places):
                yield debugger, path, number


class _Outputs(Mapping[str, Any]):
    """The outputs of one datapoint. A debugger's are read when they are asked for."""

    def __init__(self, page: _Page, entry: Entry, restore: Restore | None) -> None:
        self._page = page
        self._entry = entry
        self._restore = restore

    def __getitem__(self, debugger: str) -> Any:
        return self._page.decode(self._entry, self._entry.outputs[debugger], self._restore)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entry.outputs)

    def __len__(self) -> int:
        return len(self._entry.outputs)

    def __contains__(self, debugger: object) -> bool:
        return debugger in self._entry.outputs

    def __repr__(self) -> str:
        return f"<outputs of datapoint {self._entry.datapoint!r}: {', '.join(self)}>"


@dataclass(slots=True, eq=False)
class _Page:
    """A page, sealed or not. Its files may be renamed at any time by the writer."""

    folder: Path
    number: int
    problems: list[str] = field(default_factory=list)
    is_whole: bool = False
    """Whether all records are known: an index ends with a record that says so."""
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
        for item in journal.follow(file, self._end):
            where = f"{file.name} at byte {item.offset}"
            self._end = item.end
            if isinstance(item, journal.Gap):
                damaged = True
                self.problems.append(f"{where}: {item.end - item.offset} bytes are damaged.")
            elif item.kind == Kind.PAGE:
                read_start(item.payload, where)
            elif item.kind == Kind.DATAPOINT:
                yield record.read_key(item, where), item.offset
            elif item.kind == Kind.END:
                self.is_whole = not damaged

    def read_header(self) -> list[Entry]:
        """Return the datapoints that the page itself lists: its index was lost or cut, and it can do without."""
        path = names.page_file(self.folder, self.number, names.SEALED)
        with path.open("rb") as file:
            entries, _ = header.read(path, file, os.fstat(file.fileno()).st_size)
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
            return nodes.Decoder(lambda number: self._tensor(entry, number, restore)).decode(node)
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
        if place.origin.startswith(nodes.TORCH) and restore is not None:
            return restore(array, place.origin)
        return array

    def _name(self) -> Path:
        return names.page_file(self.folder, self.number, "*")

    def _open(self, *suffixes: str) -> Any:
        """Open the first of these files that is there, and look again if it was renamed meanwhile."""
        for _ in range(_MAX_LOOKS):
            for suffix in suffixes:
                try:
                    return names.page_file(self.folder, self.number, suffix).open("rb", buffering=0)
                except FileNotFoundError:
                    continue
        raise FileNotFoundError(f"{self._name()} is gone")


def read_content(file: BinaryIO, place: Place) -> memoryview:
    """Read the bytes of a tensor from its page, and check them.

    Raises:
        RunDamaged: They are not what was written.

    """
    size = os.fstat(file.fileno()).st_size
    # Checked before room is made: a hostile index may name any size.
    if place.end > size:
        raise RunDamaged(f"{file.name} has {size:,} bytes; {place.name!r:.80} should end at {place.end:,}.")
    content = np.empty(place.nbytes, np.uint8)
    view = content.data
    file.seek(place.start)
    while len(view):
        read = file.readinto(view)  # type: ignore[attr-defined]
        if not read:
            raise RunDamaged(f"{file.name} was cut short while {place.name!r:.80} was read.")
        view = view[read:]
    if zlib.crc32(content.data) != place.crc:
        span = f"bytes {place.start} to {place.end}"
        raise RunDamaged(f"{file.name}: {place.name!r:.80} ({span}) does not match its checksum.")
    return content.data


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


def _record_at(file: Any, at: int) -> journal.Record | None:
    size = os.fstat(file.fileno()).st_size
    file.seek(at)
    head = file.read(HEADER.size)
    if len(head) < HEADER.size:
        return None
    length = HEADER.unpack(head)[4]
    if length > size - at:
        return None
    file.seek(at)
    for found in journal.scan(file.read(HEADER.size + length), at):
        return found if isinstance(found, journal.Record) and found.offset == at else None
    return None
