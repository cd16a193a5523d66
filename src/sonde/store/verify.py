"""Checking every byte of a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from sonde.errors import RunDamaged
from sonde.store import framing, header, layout, lease
from sonde.store.log import attempts, codec, journal, sites
from sonde.store.log.codec import Kind
from sonde.store.log.segment import Maps, Segment
from sonde.store.log.segment_checks import slice_crcs
from sonde.store.timeline import EventFile, FindingFile

_MAX_LOOKS: Final = 20


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with a file."""

    file: Path
    what: str
    offset: int | None = None
    """The byte at which it begins, where that can be told."""

    def __str__(self) -> str:
        at = "" if self.offset is None else f" at byte {self.offset}"
        return f"{self.file}{at}: {self.what}"


@dataclass
class Report:
    """What `verify` found. A torn tail is the end of a record that a crash cut off; all before it is whole."""

    path: Path
    problems: list[Problem] = field(default_factory=list)
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
        """Take in what another report says about a part."""
        self.problems += other.problems
        self.torn_tails += other.torn_tails
        self.num_files += other.num_files
        self.num_blocks += other.num_blocks
        self.num_captures += other.num_captures

    def __str__(self) -> str:
        lines = [str(problem) for problem in self.problems]
        lines += [f"torn tail: {tail}" for tail in self.torn_tails]
        verdict = "every checksum is right" if self.ok else f"{len(self.problems)} problems"
        captures = f", {self.num_captures} captures" if self.num_captures else ""
        scope = f"{self.num_files} files, {self.num_blocks} blocks{captures}"
        return "\n".join([*lines, f"{self.path}: {verdict} in {scope}"])


def verify(path: str | Path) -> Report:
    """Check all checksums, all JSON, and that all sites that have readings are known; captures too.

    Raises:
        RunNotFound: There is no run at the path.

    """
    report = Report(Path(path))
    report.num_files += 1
    try:
        header.read_header(report.path)
    except RunDamaged as error:
        report.problems.append(_problem(report.path / layout.HEADER, error))
    for rank in layout.ranks(report.path):
        report.add(_look_at(layout.rank_folder(report.path, rank)))
    for rank in {0, *layout.ranks(report.path)}:
        _check_lines(report, EventFile(layout.events_file(report.path, rank)))
        _check_lines(report, FindingFile(layout.findings_file(report.path, rank)))
    # Imported here: pages report what they find in the terms of this module.
    from sonde.store.pages.check import verify_run_pages

    report.add(verify_run_pages(report.path))
    return report


def _problem(file: Path, error: Exception, offset: int | None = None) -> Problem:
    what = str(error).removeprefix(f"{file}: ").removeprefix(f"{file} ")
    return Problem(file, what, offset)


def _look_at(folder: Path) -> Report:
    """Check a folder, and once more from the start when a live writer renamed something under way."""
    for _ in range(_MAX_LOOKS):
        report = Report(folder)
        try:
            _check_folder(report, folder)
        except FileNotFoundError:
            continue
        return report
    raise RunDamaged(f"{folder} keeps changing: its files vanish as they are read.")


def _check_folder(report: Report, folder: Path) -> None:
    listing = layout.list_folder(folder)
    for _ in range(_MAX_LOOKS):  # a rename while the folder is listed can hide a file for once
        if not listing.missing:
            break
        listing = layout.list_folder(folder)
    if listing.missing:
        report.problems.append(Problem(folder, layout.describe_missing(listing.missing)))
    try:
        report.num_files += lease.read(folder) is not None
    except RunDamaged as error:
        report.problems.append(_problem(folder / layout.WRITER, error))
    for _, _, name in listing.segments:
        _check_segment(report, folder / name)
    for _, name in listing.journals:
        _check_journal(report, folder / name)


def _check_segment(report: Report, path: Path) -> None:
    report.num_files += 1
    try:
        segment = Segment(path, Maps())
    except RunDamaged as error:
        report.problems.append(_problem(path, error))
        return
    rows = segment.table()
    found = [Problem(path, what.removeprefix(f"{path}: ")) for what in segment.problems(rows)]
    report.problems.extend(found or _check_slices(segment))
    report.problems.extend(_unknown(path, segment.site.tolist(), {site.id for site in segment.sites}))
    report.num_blocks += len(segment.blocks)


def _check_slices(segment: Segment) -> list[Problem]:
    wrong = (slice_crcs(segment.table()) != segment.slice_crc).any(axis=0)
    return [
        Problem(segment.path, f"the readings of site {number} do not match their checksum")
        for number in segment.site[wrong].tolist()
    ]


def _unknown(path: Path, used: Iterable[int], known: set[int], offset: int | None = None) -> list[Problem]:
    missing = sorted(set(used) - known)
    if not missing:
        return []
    return [Problem(path, f"readings of {len(missing)} sites that are not described, such as {missing[0]}", offset)]


def _check_journal(report: Report, path: Path) -> None:
    report.num_files += 1
    check = _JournalCheck(report, path)
    end = 0
    with path.open("rb") as file:
        for item in framing.follow(file, 0):
            end = item.end
            if isinstance(item, framing.Gap):
                report.problems.append(Problem(path, f"{item.end - item.offset} bytes are damaged", item.offset))
                check.expected = None
            else:
                check.take(item)
        size = file.seek(0, 2)
    if end < size:
        report.torn_tails.append(Problem(path, f"{size - end} bytes after the last whole record", end))


class _JournalCheck:
    def __init__(self, report: Report, path: Path) -> None:
        self._report = report
        self._path = path
        self._known: set[int] = set()
        self.expected: int | None = 0

    def take(self, record: framing.Record) -> None:
        if self.expected not in (None, record.sequence):
            what = f"record {record.sequence} where {self.expected} should be"
            self._report.problems.append(Problem(self._path, what, record.offset))
        self.expected = record.sequence + 1
        if not journal.is_known(record):
            return
        try:
            self._check(record)
        except (RunDamaged, codec.BadPayload) as error:
            self._report.problems.append(_problem(self._path, error, record.offset))

    def _check(self, record: framing.Record) -> None:
        where = f"{self._path} at byte {record.offset}"
        if record.kind == Kind.SITES:
            self._known.update(site.id for site in sites.parse(record.payload, where))
        elif record.kind == Kind.START:
            attempts.parse(record.payload, where)
        else:
            block = codec.decode_block(record.step, record.payload)
            self._report.num_blocks += 1
            used = np.unique(block.sites).tolist()
            self._report.problems.extend(_unknown(self._path, used, self._known, record.offset))


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
