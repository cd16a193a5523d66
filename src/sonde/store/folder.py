"""One rank's folder, read: its segments and its open journal, as one list of tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sonde import schema
from sonde.errors import RunDamaged
from sonde.records import Site
from sonde.store import codec, journal, layout, sites, strict_json, table
from sonde.store.codec import Kind, Packed
from sonde.store.series import Readings
from sonde.store.table import Blocks, Table


@dataclass(frozen=True, slots=True)
class Attempt:
    """One stretch of writing: a run that was continued has several."""

    number: int
    start_step: int | None
    """The step it continued from, where the recorder said so; earlier attempts count only before it."""
    time: float


def parse_attempt(plain: Any, where: str) -> Attempt:
    """Read what a journal or a segment says about an attempt.

    Raises:
        RunDamaged: It makes no sense.
    """
    try:
        start = plain["start_step"]
        return Attempt(int(plain["attempt"]), None if start is None else int(start), float(plain["time"]))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RunDamaged(f"{where} does not describe an attempt: {type(error).__name__}: {error}") from None


@dataclass
class Source:
    """A file with readings: a segment, or a journal that is being followed."""

    path: Path
    tables: list[Table] = field(default_factory=list)
    sites: dict[int, Site] = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def last_attempt(self) -> int:
        """The attempt that wrote the rows (the last one, where several were compacted)."""
        return max((attempt.number for attempt in self.attempts), default=0)

    @property
    def first_step(self) -> int | None:
        """The earliest step of any row."""
        return min((int(part.blocks.step[0]) for part in self.tables if len(part.blocks)), default=None)


class JournalSource(Source):
    """Follows a journal: each `refresh` reads the records added since the last."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.end = 0
        """Where the last whole record ends."""
        self.size = 0

    def refresh(self) -> bool:
        """Read what is new; say whether there was anything."""
        with self.path.open("rb") as file:
            file.seek(self.end)
            fresh = file.read()
        self.size = self.end + len(fresh)
        packed: list[Packed] = []
        before = self.end
        for item in journal.scan(fresh, self.end):
            if isinstance(item, journal.Gap):
                self.problems.append(f"{self.path}: bytes {item.offset} to {item.end} are damaged")
                continue
            self.end = item.end
            if journal.is_known(item):
                self._take(item, packed)
        if packed:
            self._add(table.from_blocks(packed))
        return self.end > before

    def _take(self, record: journal.Record, packed: list[Packed]) -> None:
        where = f"{self.path} at byte {record.offset}"
        try:
            if record.kind == Kind.BLOCK:
                packed.append(codec.decode_block(record.step, record.payload))
            elif record.kind == Kind.SITES:
                self.sites.update((site.id, site) for site in sites.parse(record.payload, where))
            else:
                self.attempts.append(parse_attempt(strict_json.loads(record.payload, where), where))
        except codec.BadPayload as error:
            self.problems.append(f"{where}: {error}")
        except RunDamaged as error:
            self.problems.append(str(error))

    def _add(self, fresh: Table) -> None:
        # Each table at least twice as long as the next, so following a run costs a logarithm of merges.
        self.tables.append(fresh)
        while len(self.tables) > 1 and len(self.tables[-2]) < 2 * len(self.tables[-1]):
            tail = [self.tables.pop(-2), self.tables.pop()]
            self.tables.append(table.merge(tail))


class RankFolder:
    """Everything one rank has written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sources: dict[str, Source] = {}
        self.problems: list[str] = []

    def refresh(self) -> bool:
        """Read what is new; say whether there was anything."""
        changed = False
        for name in sorted(entry.name for entry in self.path.iterdir()):
            if layout.journal_number(name) is None:
                continue
            source = self.sources.setdefault(name, JournalSource(self.path / name))
            assert isinstance(source, JournalSource)
            changed |= source.refresh()
        return changed

    @property
    def sites(self) -> dict[int, Site]:
        """The sites by id."""
        known: dict[int, Site] = {}
        for source in self.sources.values():
            known.update(source.sites)
        return known

    @property
    def attempts(self) -> list[Attempt]:
        """The attempts in order, each with the step it started from as far as it is known."""
        found: dict[int, Attempt] = {}
        for source in self.sources.values():
            for attempt in source.attempts:
                start = attempt.start_step
                if start is None:
                    start = source.first_step
                known = found.get(attempt.number)
                starts = [s for s in (start, known.start_step if known else None) if s is not None]
                found[attempt.number] = Attempt(attempt.number, min(starts, default=None), attempt.time)
        return [found[number] for number in sorted(found)]

    def parts(self) -> list[tuple[Table, int | None]]:
        """Return the tables, oldest first, each with the step from which a later attempt replaces it."""
        attempts = self.attempts
        result = []
        for source in self.sources.values():
            last = source.last_attempt
            starts = [a.start_step for a in attempts if a.number > last and a.start_step is not None]
            limit = min(starts, default=None)
            result.extend((part, limit) for part in source.tables)
        return result

    def blocks(self) -> Blocks:
        """Return one line a step."""
        parts = [
            part.blocks if limit is None else part.blocks.take(np.flatnonzero(part.blocks.step < limit))
            for part, limit in self.parts()
        ]
        joined = table.concat_blocks(parts)
        return joined.take(table.last_of_each([joined.step]))

    def readings(
        self, ids: list[int], columns: tuple[int, ...], *, bins: bool, start: int | None, stop: int | None
    ) -> Readings:
        """Return the readings of a site (with any of `ids`), reading only the given columns."""
        found = [
            piece
            for part, limit in self.parts()
            for number in ids
            if (piece := _cut(part, number, start, _least(stop, limit)))
        ]
        step = _join([part.step[rows] for part, rows in found], "i8")
        keep: Any = slice(None)
        if len(step) > 1 and not (step[1:] > step[:-1]).all():
            keep = table.last_of_each([step])
        stats = np.zeros((len(step), schema.NUM_COLUMNS))
        for column in columns:
            stats[:, column] = _join([part.stats[column, rows] for part, rows in found], "f8")
        lengths = _join([part.hist_len[rows] for part, rows in found], "u1")
        all_bins = _bins(found, lengths) if bins else None
        return Readings(
            step=step[keep],
            span=_join([part.span[rows] for part, rows in found], "u4")[keep],
            merged=_join([part.merged[rows] for part, rows in found], "u4").astype(np.float64)[keep],
            rows=stats[keep],
            bins=None if all_bins is None else all_bins[keep],
            binned=(lengths > 0)[keep],
        )


def _least(left: int | None, right: int | None) -> int | None:
    return min((value for value in (left, right) if value is not None), default=None)


def _cut(part: Table, number: int, start: int | None, stop: int | None) -> tuple[Table, slice] | None:
    rows = part.where(number)
    steps = part.step[rows]
    first = rows.start + (0 if start is None else int(np.searchsorted(steps, start)))
    last = rows.stop if stop is None else rows.start + int(np.searchsorted(steps, stop))
    return (part, slice(first, last)) if first < last else None


def _bins(found: list[tuple[Table, slice]], lengths: NDArray[np.uint8]) -> NDArray[np.uint64]:
    lo = _join([part.hist_lo[rows] for part, rows in found], "u1")
    counts = [part.hist[int(part.hist_offset[rows.start]) : int(part.hist_offset[rows.stop])] for part, rows in found]
    return codec.unpack_bins(lo, lengths, _join(counts, "u4"))[0]


def _join(parts: list[NDArray[Any]], dtype: str) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
