"""Check every byte of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from sonde.core import files
from sonde.errors import RunDamaged
from sonde.store import contents, framing, header, layout, lease
from sonde.store.log import attempts, codec, journal, sites
from sonde.store.log.codec import Kind
from sonde.store.log.segment import Segment
from sonde.store.log.segment_format import slice_crcs
from sonde.store.log.table import Table
from sonde.store.pages import names, open_page, record
from sonde.store.pages.page import read_content
from sonde.store.pages.record import Entry
from sonde.store.pages.record import Kind as PageKind
from sonde.store.remote import mirror
from sonde.store.timeline import EventFile, FindingFile

_MAX_LOOKS: Final = 20
_PIECE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with a file."""

    file: Path
    what: str
    offset: int | None = None
    """The byte at which it begins, where that is known."""

    def __str__(self) -> str:
        at = "" if self.offset is None else f" at byte {self.offset}"
        return f"{self.file}{at}: {self.what}"


@dataclass
class Report:
    """What `verify` found. A torn tail is the end of a record that a crash cut off; all before it is whole."""

    path: Path
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What could not be checked."""
    torn_tails: list[Problem] = field(default_factory=list)
    num_files: int = 0
    num_blocks: int = 0
    """Blocks whose checksums are right."""
    num_captures: int = 0
    """Captures of datapoints whose records can be read."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; torn tails are not."""
        return not self.problems

    def add(self, other: Report) -> None:
        """Add the report of a part."""
        self.problems += other.problems
        self.torn_tails += other.torn_tails
        self.notes += other.notes
        self.num_files += other.num_files
        self.num_blocks += other.num_blocks
        self.num_captures += other.num_captures

    def __str__(self) -> str:
        lines = [str(problem) for problem in self.problems]
        lines += [f"torn tail: {tail}" for tail in self.torn_tails]
        lines += self.notes
        verdict = "every checksum is right" if self.ok else f"{len(self.problems)} problems"
        captures = f", {self.num_captures} captures" if self.num_captures else ""
        scope = f"{self.num_files} files, {self.num_blocks} blocks{captures}"
        return "\n".join([*lines, f"{self.path}: {verdict} in {scope}"])


def verify(path: str | Path) -> Report:
    """Check all checksums, all JSON, and that all sites that have readings are known; captures too.

    Raises:
        RunNotFound: There is no run at the path.

    """
    report = Report(mirror.local_path(path))
    mirror.need_all(report.path)
    report.num_files += 1
    try:
        header.read_header(report.path)
    except RunDamaged as error:
        report.problems.append(_problem(report.path / layout.HEADER, error))
    for rank in layout.ranks(report.path):
        report.add(_check_steadily(layout.rank_folder(report.path, rank), _check_telemetry))
    for rank in {0, *layout.ranks(report.path)}:
        _check_lines(report, EventFile(layout.events_file(report.path, rank)))
        _check_lines(report, FindingFile(layout.findings_file(report.path, rank)))
    for folder in names.page_folders(report.path):
        report.add(verify_pages(folder))
    _check_presence(report)
    return report


def _check_presence(report: Report) -> None:
    """Check that everything is here that the writers have left."""
    run, ranks = report.path, layout.ranks(report.path)
    if not ranks:
        report.problems.append(Problem(run / layout.TELEMETRY, "is missing, or holds no folder of a rank"))
    for rank in ranks:
        try:
            note = lease.read(layout.rank_folder(run, rank))
        except RunDamaged:
            continue  # reported with its folder
        if note is None or note.journal_bytes is None:
            report.notes.append(f"Rank {rank} was written before Sonde listed files: removed ones are not noticed.")
            continue
        if note.contents is None:  # it was killed
            events = layout.events_file(run, rank)
            size = events.stat().st_size if events.is_file() else 0
            if size < (note.events_bytes or 0):
                report.problems.append(Problem(events, f"has {size:,} bytes; it had {note.events_bytes:,}"))
            continue
        known = {problem.file for problem in report.problems}
        try:
            found = contents.problems(run, contents.read(run, rank, note.contents))
            report.problems.extend(Problem(path, what) for path, what in found if path not in known)
        except RunDamaged as error:
            report.problems.append(_problem(layout.rank_folder(run, rank) / contents.NAME, error))


def verify_pages(folder: str | Path) -> Report:
    """Check all checksums of the pages in a folder, and that pages, headers and indexes agree."""
    report = Report(Path(folder))
    for each in names.rank_folders(report.path):
        report.add(_check_steadily(each, _check_pages))
    return report


def _check_steadily(folder: Path, check: Callable[[Report], None]) -> Report:
    """Check a folder, and once more from the start when a live writer renamed something meanwhile."""
    for _ in range(_MAX_LOOKS):
        report = Report(folder)
        try:
            check(report)
        except FileNotFoundError:
            continue
        except RunDamaged as error:  # such as a pipe in the place of a file
            report.problems.append(Problem(folder, str(error)))
        return report
    raise RunDamaged(f"{folder} keeps changing: its files vanish as they are read.")


def _problem(file: Path, error: Exception, offset: int | None = None) -> Problem:
    what = str(error)
    for prefix in (f"{file} at byte {offset}: ", f"{file}: ", f"{file} "):
        what = what.removeprefix(prefix)
    return Problem(file, what, offset)


def _check_records(report: Report, path: Path, take: Callable[[framing.Record, str], None]) -> int:
    """Check the records of a journal or an index; return where the last whole one ends."""
    end = 0
    expected: int | None = 0
    with files.open_file(path) as file:
        for item in framing.follow(file, 0):
            end = item.end
            if isinstance(item, framing.Gap):
                report.problems.append(Problem(path, f"{item.end - item.offset} bytes are damaged", item.offset))
                expected = None  # what is missing cannot be counted
                continue
            if expected not in (None, item.sequence):
                report.problems.append(Problem(path, f"record {item.sequence} where {expected} should be", item.offset))
            expected = item.sequence + 1
            try:
                take(item, f"{path} at byte {item.offset}")
            except (RunDamaged, codec.BadPayload) as error:
                report.problems.append(_problem(path, error, item.offset))
        size = file.seek(0, 2)
    if end < size:
        report.torn_tails.append(Problem(path, f"{size - end} bytes after the last whole record", end))
    return end


def _check_lines(report: Report, file: EventFile | FindingFile) -> None:
    path = file.path
    if not path.exists():
        return
    report.num_files += 1
    file.refresh()
    report.problems.extend(_problem(path, RunDamaged(what), offset) for offset, what in file.bad_lines)
    size = path.stat().st_size
    if file.end < size:
        report.torn_tails.append(Problem(path, f"{size - file.end} bytes after the last whole line", file.end))


# ---------------------------------------------------------------------- telemetry


def _check_telemetry(report: Report) -> None:
    folder = report.path
    listing = layout.list_folder(folder)
    for _ in range(_MAX_LOOKS):  # a rename while the folder is listed can hide a file for once
        if not listing.missing:
            break
        listing = layout.list_folder(folder)
    if listing.missing:
        report.problems.append(Problem(folder, layout.describe_missing(listing.missing)))
    try:
        note = lease.read(folder)
        if note is None:
            report.problems.append(Problem(folder / layout.WRITER, "is missing"))
        else:
            report.num_files += 1
            _check_newest(report, note, listing)
    except RunDamaged as error:
        report.problems.append(_problem(folder / layout.WRITER, error))
    for _, _, name in listing.segments:
        _check_segment(report, folder / name)
    for _, name in listing.journals:
        report.num_files += 1
        _check_records(report, folder / name, _JournalCheck(report, folder / name).take)


def _check_newest(report: Report, note: lease.Lease, listing: layout.Listing) -> None:
    """Check that the journal which the writer noted last is here, or the segment made from it, and is not cut."""
    if listing.next_number <= note.journal:
        name = layout.journal_name(note.journal)
        report.problems.append(Problem(report.path / name, "is missing, and so is the segment made from it"))
    for number, name in listing.journals:
        size = (report.path / name).stat().st_size
        least = max(1, note.journal_bytes or 0) if number == note.journal else 1
        if size < least and number <= note.journal:  # a later one had only been begun when the process ended
            report.problems.append(Problem(report.path / name, f"has {size:,} bytes; {least:,} were written"))


def _check_segment(report: Report, path: Path) -> None:
    report.num_files += 1
    try:
        segment = Segment(path)
        rows = segment.read()
    except RunDamaged as error:
        report.problems.append(_problem(path, error))
        return
    found = [Problem(path, what.removeprefix(f"{path}: ")) for what in segment.problems(rows)]
    report.problems.extend(found or _check_slices(segment, rows))
    report.problems.extend(_unknown(path, segment.site.tolist(), {site.id for site in segment.sites}))
    report.num_blocks += len(segment.blocks)


def _check_slices(segment: Segment, rows: Table) -> list[Problem]:
    wrong = (slice_crcs(rows) != segment.slice_crc).any(axis=0)
    return [
        Problem(segment.path, f"the readings of site {number} do not match their checksum")
        for number in segment.site[wrong].tolist()
    ]


def _unknown(path: Path, used: Iterable[int], known: set[int], offset: int | None = None) -> list[Problem]:
    missing = sorted(set(used) - known)
    if not missing:
        return []
    return [Problem(path, f"readings of {len(missing)} sites that are not described, such as {missing[0]}", offset)]


class _JournalCheck:
    """Checks that the records of a journal make sense, and that all its sites are described."""

    def __init__(self, report: Report, path: Path) -> None:
        self._report = report
        self._path = path
        self._known: set[int] = set()

    def take(self, record: framing.Record, where: str) -> None:
        if not journal.is_known(record):
            return
        if record.kind == Kind.SITES:
            self._known.update(site.id for site in sites.parse(record.payload, where))
        elif record.kind == Kind.START:
            attempts.parse(record.payload, where)
        else:
            block = codec.decode_block(record.step, record.payload)
            self._report.num_blocks += 1
            used = np.unique(block.sites).tolist()
            self._report.problems.extend(_unknown(self._path, used, self._known, record.offset))


# ---------------------------------------------------------------------- captures


def _check_pages(report: Report) -> None:
    folder = report.path
    pages = names.list_pages(folder)
    note = _note_of(report)
    newest = max([page.number for page in pages], default=-1)
    if note is not None and note.state != "live":
        newest = max(newest, min(note.journal, newest + layout.MAX_MISSING) - 1)
    missing = sorted(set(range(newest + 1)) - {page.number for page in pages})
    report.problems += [Problem(names.page_file(folder, each, names.SEALED), "is missing") for each in missing]
    for page in pages:
        _check_page(report, folder, page)


def _note_of(report: Report) -> lease.Lease | None:
    try:
        return lease.read(report.path)
    except RunDamaged as error:
        report.problems.append(_problem(report.path / layout.WRITER, error))
        return None


def _check_page(report: Report, folder: Path, page: names.Page) -> None:
    report.num_files += len(page.suffixes)
    entries: list[Entry] | None = None
    if page.records is None:
        report.problems.append(Problem(names.page_file(folder, page.number, names.INDEX), "is missing"))
    else:
        entries = _check_index(report, names.page_file(folder, page.number, page.records), is_sealed=page.is_sealed)
    if page.is_sealed:
        _check_sealed(report, names.page_file(folder, page.number, names.SEALED), entries)
    elif names.OPEN in page.suffixes:
        path = names.page_file(folder, page.number, names.OPEN)
        with files.open_file(path) as file:
            _check_tensors(report, file, entries or [])
    elif entries:
        report.problems.append(Problem(names.page_file(folder, page.number, names.SEALED), "is missing"))


def _check_sealed(report: Report, path: Path, indexed: list[Entry] | None) -> None:
    with files.open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            entries, start = open_page.read_header(path, file)
        except RunDamaged as error:
            report.problems.append(_problem(path, error))
            # The index still has the places of the tensors.
            _check_tensors(report, file, indexed or [])
            return
        _check_tensors(report, file, entries)
        _check_padding(report, file, entries, start, size)
    if indexed is not None and [_identity(each) for each in entries] != [_identity(each) for each in indexed]:
        report.problems.append(Problem(path, "its header and its index list different datapoints"))


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


def _check_index(report: Report, path: Path, *, is_sealed: bool) -> list[Entry] | None:
    """Check the records of a page; return its datapoints, or None if some of them could not be read."""
    before = len(report.problems)
    check = _IndexCheck(report)
    end = _check_records(report, path, check.take)
    if is_sealed and not check.has_ended:
        report.problems.append(Problem(path, "its last record is missing", end))
    return check.entries if len(report.problems) == before else None


class _IndexCheck:
    """Checks that the records of a page make sense, and that the last one lists the others."""

    def __init__(self, report: Report) -> None:
        self.entries: list[Entry] = []
        self.has_ended = False
        self._report = report
        self._table: list[tuple[object, int]] = []

    def take(self, item: framing.Record, where: str) -> None:
        if item.kind == PageKind.PAGE:
            record.read_start(item.payload, where)
        elif item.kind == PageKind.DATAPOINT:
            entry = record.decode(item.payload, where)
            if record.read_key(item, where) != entry.datapoint:
                raise RunDamaged(f"{where}: a record of two datapoints.")
            self.entries.append(entry)
            self._table.append((entry.datapoint, item.offset))
            self._report.num_captures += 1
        elif item.kind == PageKind.END:
            self.has_ended = True
            if record.read_end(item.payload, where) != self._table:
                raise RunDamaged(f"{where}: a table of other datapoints than those before it.")
