"""One page in progress: raw tensors in one file, records in another, until both are sealed."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from sonde.core import files
from sonde.core.files import sync_folder
from sonde.errors import RunDamaged
from sonde.store import framing, sealed
from sonde.store.lines import Appender
from sonde.store.pages import dtypes, names, record
from sonde.store.pages.record import ALIGN, FORMAT, Datapoint, Draft, Entry, Kind, parse
from sonde.store.sealed import Extent, SealedFile

MAX_TENSORS: Final = 10_000  # of one page: a header is parsed whole
_WRITE_BYTES: Final = 1 << 30  # the most that one call of the system takes


class OpenPage:
    """A page that takes datapoints."""

    def __init__(self, folder: Path, number: int, *, reserved: int, rank: int, created: float) -> None:
        self.folder = folder
        self.number = number
        self.reserved = reserved
        self._header = Header(rank)
        self._names: set[str] = set()
        self._table: list[tuple[Datapoint, int]] = []
        self._sequence = 0
        described = {
            "format": FORMAT.name,
            "schema_version": FORMAT.version,
            "rank": rank,
            "reserved": reserved,
            "created": created,
        }
        self._journal = Appender(names.page_file(folder, number, names.JOURNAL), new=True)
        self._data = Appender(names.page_file(folder, number, names.OPEN), new=True)
        try:
            self._data.append(bytes(reserved))
            self._append_record(record.encode_page(described))
        except OSError:
            self.close()
            self._data.path.unlink()
            self._journal.path.unlink()
            raise

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return self._data.size - self.reserved

    @property
    def num_datapoints(self) -> int:
        """How many datapoints it holds."""
        return self._sequence - 1

    def has_room(self, draft: Draft) -> bool:
        """Return whether the header has room for one more datapoint."""
        room = self.reserved - self._header.size - header_bytes(draft)
        return room >= 0 and self._header.num_tensors + len(draft.blobs) < MAX_TENSORS

    def add(self, draft: Draft) -> None:
        """Write a datapoint: its tensors, then its record.

        Raises:
            OSError: It was not written; the page is as it was before.

        """
        before = self._data.size
        chosen = self._choose_names(draft)
        order = sorted(range(len(draft.blobs)), key=lambda at: -dtypes.item_bytes(_dtype(draft, at)))
        starts = [0] * len(draft.blobs)
        at = before
        for each in order:
            starts[each] = at
            at += len(draft.blobs[each].content)
        text = record.render(draft, chosen, starts)
        padding = -at % ALIGN
        item = self._describe(draft, chosen, starts, text, at, padding)
        try:
            for each in order:
                self._write(draft.blobs[each].content)
            self._write(memoryview(bytes(padding)))
            place = (draft.datapoint, self._journal.size)
            encoded = record.encode(self._sequence, record.key_text(draft.datapoint), text.encode(), draft.previews)
            self._append_record(encoded)
        except OSError:
            self._data.cut(before)
            raise
        self._table.append(place)
        self._names.update(chosen)
        self._header.add(item)

    def seal(self, *, sync: bool) -> None:
        """Fill in the header and rename the files.

        Raises:
            OSError: The page stays open, and can be read as it is.

        """
        fill_header(self._data.path, self._header, self.reserved)
        self._journal.append(record.encode_end(self._sequence, self._table, self._journal.size))
        if sync:
            self._data.sync()
            self._journal.sync()
        self.close()
        give_names(self.folder, self.number, sync=sync)

    def close(self) -> None:
        """Close the files as they are."""
        self._data.close()
        self._journal.close()

    def _describe(self, draft: Draft, chosen: list[str], starts: list[int], text: str, end: int, pad: int) -> Item:
        tensors = []
        for name, blob, start in zip(chosen, draft.blobs, starts, strict=True):
            dtype, shape = dtypes.to_safetensors(_parse(blob.dtype), blob.shape)
            first = start - self.reserved
            tensors.append((name, dtype, shape, first, first + len(blob.content)))
        if pad:
            tensors.append(padding_tensor(end, pad, self.reserved))
        return make_item(text, tensors)

    def _choose_names(self, draft: Draft) -> list[str]:
        """Return a name for each tensor that no other one of the page has."""
        chosen: list[str] = []
        taken = set[str]()
        for blob in draft.blobs:
            name, count = blob.label, 1
            while name in self._names or name in taken:
                count += 1
                name = f"{blob.label}~{count}"
            taken.add(name)
            chosen.append(name)
        return chosen

    def _write(self, content: memoryview) -> None:
        for start in range(0, len(content), _WRITE_BYTES):
            # A view is as good as bytes to the system, and copies nothing.
            self._data.append(cast("bytes", content[start : start + _WRITE_BYTES]))

    def _append_record(self, encoded: bytes) -> None:
        self._journal.append(encoded)
        self._sequence += 1


def _dtype(draft: Draft, at: int) -> dtypes.Dtype:
    return _parse(draft.blobs[at].dtype)


def _parse(described: Any) -> dtypes.Dtype:
    dtype = dtypes.parse(described)
    assert dtype is not None, described
    return dtype


def padding_tensor(end: int, pad: int, data_start: int) -> tuple[str, str, tuple[int, ...], int, int]:
    """Return a tensor that covers the bytes between two datapoints: the format allows no gaps."""
    first = end - data_start
    return f"padding/{first}", "U8", (pad,), first, first + pad


def header_bytes(draft: Draft) -> int:
    """Return how much of a header a datapoint takes, at most."""
    text = record.render(draft, [blob.label + "~00000000" for blob in draft.blobs], [10**15] * len(draft.blobs))
    labels = sum(len(blob.label) * 6 + 21 * len(blob.shape) for blob in draft.blobs)
    return len(text) + text.count('"') + text.count("\\") + labels + 150 * (len(draft.blobs) + 1)


def fill_header(page: Path, header: Header, reserved: int) -> None:
    """Write the header into the room that an open page reserved for it."""
    with page.open("r+b", buffering=0) as file:
        file.write(header.render(reserved))


def give_names(folder: Path, number: int, *, sync: bool) -> None:
    """Give the files of a page that is finished their final names."""
    names.page_file(folder, number, names.OPEN).rename(names.page_file(folder, number, names.SEALED))
    # A crash between these two leaves the journal, which readers take as well.
    names.page_file(folder, number, names.JOURNAL).rename(names.page_file(folder, number, names.INDEX))
    if sync:
        sync_folder(folder)


def repair(folder: Path, page: names.Page, *, rank: int, sync: bool) -> bool:
    """Finish a page that a writer left behind; False if it held nothing and is gone.

    What a crash cut off is left out: it was never acknowledged.

    Raises:
        RunDamaged: Its journal cannot be read.

    """
    suffixes = page.suffixes
    if page.is_sealed:
        if names.INDEX not in suffixes and names.JOURNAL in suffixes:
            index = names.page_file(folder, page.number, names.INDEX)
            names.page_file(folder, page.number, names.JOURNAL).rename(index)
        return True
    if suffixes == {names.JOURNAL}:
        # The journal is made first. Alone it names no datapoint: the page died in its first moments.
        names.page_file(folder, page.number, names.JOURNAL).unlink()
        return False
    if names.OPEN not in suffixes or names.JOURNAL not in suffixes:
        raise RunDamaged(
            f"{names.page_file(folder, page.number, '*')}: of an open page, only {set(suffixes)} is there."
        )
    return _finish_left(folder, page.number, rank=rank, sync=sync)


def _finish_left(folder: Path, number: int, *, rank: int, sync: bool) -> bool:
    journal_file = names.page_file(folder, number, names.JOURNAL)
    page_file = names.page_file(folder, number, names.OPEN)
    found, reserved, end = read_journal(journal_file)
    entries = [entry for _, entry in found]
    if not entries:
        page_file.unlink()
        journal_file.unlink()
        return False
    # Bytes come before their record, so a record whose bytes are missing means that the file was cut by other hands.
    size = page_file.stat().st_size
    if any(place.end > size for entry in entries for place in entry.places):
        raise RunDamaged(f"{page_file} has {size:,} bytes, but its journal names tensors beyond them.")
    header = Header(rank)
    at = reserved
    for entry in entries:
        at = _add_again(header, entry, at, reserved)
    os.truncate(page_file, at)
    fill_header(page_file, header, reserved)
    appender = Appender(journal_file, new=False)
    try:
        appender.cut(end)
        table = [(entry.datapoint, offset) for offset, entry in found]
        appender.append(record.encode_end(len(entries) + 1, table, end))
        if sync:
            appender.sync()
    finally:
        appender.close()
    give_names(folder, number, sync=sync)
    return True


def _add_again(header: Header, entry: Entry, at: int, reserved: int) -> int:
    tensors = []
    end = at
    for place in entry.places:
        dtype, shape = dtypes.to_safetensors(place.dtype, place.shape)
        tensors.append((place.name, dtype, shape, place.start - reserved, place.end - reserved))
        end = max(end, place.end)
    pad = -end % ALIGN
    if pad:
        tensors.append(padding_tensor(end, pad, reserved))
    header.add(make_item(entry.text, tensors))
    return end + pad


def read_journal(path: Path) -> tuple[list[tuple[int, Entry]], int, int]:
    """Read all datapoints of a page's journal.

    Returns:
        Where each begins and what it is, where tensors begin, and where the last of them ends.

    Raises:
        RunDamaged: It is not a journal, or damaged in the middle.

    """
    entries: list[tuple[int, Entry]] = []
    reserved, end = 0, 0
    with files.open_file(path) as file:
        for item in framing.follow(file, 0):
            where = f"{path} at byte {item.offset}"
            if isinstance(item, framing.Gap):
                raise RunDamaged(f"{where}: {item.end - item.offset} bytes are damaged.")
            if item.kind == Kind.END:
                break
            end = item.end
            if item.kind == Kind.PAGE:
                reserved = record.read_start(item.payload, where)
            elif item.kind == Kind.DATAPOINT:
                entries.append((item.offset, record.decode(item.payload, where)))
    if entries and not reserved:
        raise RunDamaged(f"{path} does not begin like the journal of a page.")
    return entries, reserved, end


class Header:
    """A header that grows with its page. It knows its length before it is written."""

    def __init__(self, rank: int) -> None:
        fields = {"format": FORMAT.name, "schema_version": str(FORMAT.version), "rank": str(rank)}
        self._head = sealed.open_metadata(fields) + b',"datapoints":"['
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
    """The header's entries for one datapoint."""

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


def read_header(path: Path, file: BinaryIO) -> tuple[list[Entry], int]:
    """Read a page's header.

    Returns:
        Its datapoints, and where its tensors begin.

    Raises:
        RunDamaged: It is not what was written.

    """
    page = SealedFile.read(path, file, FORMAT)
    text = page.metadata.get("datapoints", "").encode("utf-8", "surrogatepass")
    listed = files.decode(text, list[Any], f"{path}: its datapoints", "a list")
    entries = [parse(plain, "", f"{path}: datapoint {at}") for at, plain in enumerate(listed)]
    _compare(path, entries, page)
    return entries, page.start


def _compare(path: Path, entries: list[Entry], page: SealedFile) -> None:
    """Raise RunDamaged unless the header describes each tensor alike for safetensors and for Sonde."""
    for place in (place for entry in entries for place in entry.places):
        dtype, shape = dtypes.to_safetensors(place.dtype, place.shape)
        if page.tensors.get(place.name) != Extent(dtype, shape, place.start, place.end):
            raise RunDamaged(f"{path}: it describes the tensor {place.name!r:.80} in two ways.")
