"""Checking every byte of pages."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, Final

from sonde.errors import RunDamaged
from sonde.store import framing
from sonde.store.pages import header, names, record
from sonde.store.pages.open_page import read_start
from sonde.store.pages.page import read_content
from sonde.store.pages.record import Entry, Kind
from sonde.store.verify import Problem, Report

_MAX_LOOKS: Final = 20
_PIECE: Final = 1 << 20


def verify_run_pages(run: Path) -> Report:
    """Check the pages of all epochs of a run, and of its evaluation."""
    report = Report(run)
    for folder in names.page_folders(run):
        report.add(verify_pages(folder))
    return report


def verify_pages(folder: str | Path) -> Report:
    """Check all checksums of the pages in a folder, and that pages, headers and indexes agree."""
    report = Report(Path(folder))
    for each in names.rank_folders(report.path):
        report.add(_look_at(each))
    return report


def _look_at(folder: Path) -> Report:
    """Check a folder, and once more from the start when a live writer renamed something under way."""
    for _ in range(_MAX_LOOKS):
        report = Report(folder)
        pages = names.list_pages(folder)
        missing = sorted(set(range(pages[-1].number if pages else 0)) - {page.number for page in pages})
        report.problems += [Problem(names.page_file(folder, each, names.SEALED), "is missing") for each in missing]
        try:
            for page in pages:
                _check_page(report, folder, page)
        except FileNotFoundError:
            continue
        return report
    raise RunDamaged(f"{folder} keeps changing: its files vanish as they are read.")


def _check_page(report: Report, folder: Path, page: names.Page) -> None:
    report.num_files += len(page.suffixes)
    entries: list[Entry] | None = None
    if page.records is None:
        report.problems.append(Problem(names.page_file(folder, page.number, names.INDEX), "is missing"))
    else:
        entries = _Index(report, names.page_file(folder, page.number, page.records), is_sealed=page.is_sealed).read()
    if page.is_sealed:
        _check_sealed(report, names.page_file(folder, page.number, names.SEALED), entries)
    elif names.OPEN in page.suffixes:
        path = names.page_file(folder, page.number, names.OPEN)
        with path.open("rb") as file:
            _check_tensors(report, file, entries or [])
    elif entries:
        report.problems.append(Problem(names.page_file(folder, page.number, names.SEALED), "is missing"))


def _check_sealed(report: Report, path: Path, indexed: list[Entry] | None) -> None:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            entries, start = header.read(path, file)
        except RunDamaged as error:
            report.problems.append(_problem(path, error))
            # The index tells where the tensors are, all the same.
            _check_tensors(report, file, indexed or [])
            return
        _check_tensors(report, file, entries)
        _check_padding(report, file, entries, start, size)
    if indexed is not None and [_identity(each) for each in entries] != [_identity(each) for each in indexed]:
        report.problems.append(Problem(path, "its header and its index tell of different datapoints"))


def _identity(entry: Entry) -> tuple[object, ...]:
    return (entry.datapoint, entry.time, entry.outputs, entry.info, [(each.name, each.crc) for each in entry.places])


def _check_tensors(report: Report, file: BinaryIO, entries: list[Entry]) -> None:
    for place in (place for entry in entries for place in entry.places):
        try:
            read_content(file, place)
        except RunDamaged as error:
            report.problems.append(_problem(Path(file.name), error, place.start))


def _check_padding(report: Report, file: BinaryIO, entries: list[Entry], start: int, size: int) -> None:
    at = start
    for place in [*sorted((each for entry in entries for each in entry.places), key=lambda each: each.start), None]:
        end = place.start if place is not None else size
        if at < end and not _is_zero(file, at, end):
            report.problems.append(Problem(Path(file.name), f"{end - at} bytes between tensors are not zero", at))
        at = max(at, place.end) if place is not None else end


def _is_zero(file: BinaryIO, start: int, end: int) -> bool:
    file.seek(start)
    return not any(any(file.read(min(_PIECE, end - at))) for at in range(start, end, _PIECE))


class _Index:
    """The file of a page's records, read from end to end."""

    def __init__(self, report: Report, path: Path, *, is_sealed: bool) -> None:
        self._report = report
        self._path = path
        self._is_sealed = is_sealed
        self._entries: list[Entry] = []
        self._table: list[tuple[object, int]] = []
        self._ended = False

    def read(self) -> list[Entry] | None:
        """Return its datapoints; None if some of them could not be read."""
        before = len(self._report.problems)
        end, expected = 0, 0
        with self._path.open("rb") as file:
            for item in framing.follow(file, 0):
                end = item.end
                if isinstance(item, framing.Gap):
                    self._complain(f"{item.end - item.offset} bytes are damaged", item.offset)
                    continue
                if item.sequence != expected:
                    self._complain(f"record {item.sequence} where {expected} should be", item.offset)
                expected = item.sequence + 1
                self._take(item)
            size = file.seek(0, 2)
        if end < size:
            self._report.torn_tails.append(Problem(self._path, f"{size - end} bytes after the last whole record", end))
        if self._is_sealed and not self._ended:
            self._complain("its last record is missing", end)
        return self._entries if len(self._report.problems) == before else None

    def _take(self, item: framing.Record) -> None:
        where = f"{self._path} at byte {item.offset}"
        try:
            if item.kind == Kind.PAGE:
                read_start(item.payload, where)
            elif item.kind == Kind.DATAPOINT:
                self._entries.append(_checked(item, where))
                self._report.num_captures += 1
                self._table.append((self._entries[-1].datapoint, item.offset))
            elif item.kind == Kind.END:
                self._ended = True
                if record.read_end(item.payload, where) != self._table:
                    self._complain("a table of other datapoints than those before it", item.offset)
        except RunDamaged as error:
            self._report.problems.append(_problem(self._path, error, item.offset))

    def _complain(self, what: str, offset: int) -> None:
        self._report.problems.append(Problem(self._path, what, offset))


def _checked(item: framing.Record, where: str) -> Entry:
    entry = record.decode(item.payload, where)
    if record.read_key(item, where) != entry.datapoint:
        raise RunDamaged(f"{where}: a record of two datapoints.")
    return entry


def _problem(file: Path, error: Exception, offset: int | None = None) -> Problem:
    what = str(error)
    for prefix in (f"{file} at byte {offset}: ", f"{file}: ", f"{file} "):
        what = what.removeprefix(prefix)
    return Problem(file, what, offset)
