"""Read one rank's folder: its segments and its open journal, as one list of tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.core import schema
from sonde.errors import RunDamaged
from sonde.records import Site
from sonde.store import layout
from sonde.store.log import attempts, codec, table
from sonde.store.log.attempts import Attempt
from sonde.store.log.journal import JournalSource
from sonde.store.log.segment import SHARED, Loaded, Segment, Stamp
from sonde.store.log.table import Blocks, Snapshot, Table, join
from sonde.store.series import Readings

# Files are renamed and deleted while a folder is read. Each turn of a writer's compaction can spoil one look at it;
# none is so busy that it spoils this many.
_MAX_LOOKS: Final = 200


@dataclass(frozen=True, slots=True)
class Part:
    """Readings from one place, as far as no later attempt replaces them."""

    blocks: Blocks
    limit: int | None
    """The step from which a later attempt counts."""
    segment: Segment | None
    loaded: Table | None

    def rows(self) -> Table:
        """Return all readings, read from their segment if need be."""
        if self.loaded is not None:
            return self.loaded
        assert self.segment is not None
        return self.segment.table()

    def site(self) -> NDArray[np.uint32]:
        """Return the sites that have readings here."""
        return self.segment.site if self.segment is not None else self.rows().site


class RankFolder:
    """Everything one rank has written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sites: dict[int, Site] = {}
        """The sites by id."""
        self.attempts: list[Attempt] = []
        self.blocks: Blocks = table.empty_blocks()
        """One line a step."""
        self.parts: list[Part] = []
        """What was read, oldest first."""
        self.segments: dict[str, Segment] = {}
        self.journals: dict[str, JournalSource] = {}
        self._bad_segments: dict[str, tuple[Stamp, str]] = {}
        self._damage: dict[str, None] = {}
        self._known_sites: dict[str, list[Site]] = {}
        self._missing: list[int] = []
        self._is_followed = False

    @property
    def problems(self) -> list[str]:
        """What could not be read, and is left out: each entry names the file."""
        missing = [f"{self.path}: {layout.describe_missing(self._missing)}"] if self._missing else []
        bad = [why for _, why in self._bad_segments.values()]
        return [*missing, *bad, *(p for source in self.journals.values() for p in source.problems), *self._damage]

    def refresh(self) -> bool:
        """Read what is new; return whether there was anything.

        Raises:
            FileNotFoundError: All files are gone. What was read stays.

        """
        before = (list(self.segments.values()), list(self.journals), list(self._bad_segments))
        for look in range(_MAX_LOOKS):
            listing = layout.list_folder(self.path)
            # Files are renamed while the folder is listed: only what stays missing is missing.
            if listing.missing != self._missing and look < _MAX_LOOKS // 10:
                continue
            self._missing = listing.missing
            if self.segments.keys() | self.journals.keys() and not (listing.segments or listing.journals):
                raise FileNotFoundError(f"{self.path} is being deleted")  # nothing a writer does leaves nothing
            try:
                grew = self._take(listing)
            except FileNotFoundError:
                continue  # what was read so far is kept, so each look is shorter
            changed = grew or before != (list(self.segments.values()), list(self.journals), list(self._bad_segments))
            if changed:
                self._arrange()
            self._is_followed = True
            return changed
        raise RunDamaged(f"{self.path} keeps changing: its files vanish as they are read.")

    def _take(self, listing: layout.Listing) -> bool:
        segments, bad = {}, {}
        for _, _, name in listing.segments:
            opened = self._open(name)
            if isinstance(opened, Segment):
                if self._is_followed:
                    opened.hold()  # at once: a busy writer may replace it before anyone asks
                segments[name] = opened
                self._keep(name, opened)
            else:
                bad[name] = self._bad_segments[name] = opened
        grew = False
        journals = {}
        for _, name in listing.journals:
            journals[name] = self.journals.setdefault(name, JournalSource(self.path / name))
            grew |= journals[name].refresh()
        for name, segment in self.segments.items():
            if name not in segments:
                SHARED.drop(segment)
        self.segments, self.journals, self._bad_segments = segments, journals, bad
        return grew

    def _keep(self, name: str, segment: Segment) -> None:
        old = self.segments.get(name)
        if old is not None and old is not segment:
            SHARED.drop(old)
        self.segments[name] = segment

    def _open(self, name: str) -> Segment | tuple[Stamp, str]:
        path = self.path / name
        stamp = Stamp.of(path.stat())
        known, bad = self.segments.get(name), self._bad_segments.get(name)
        if known is not None and known.stamp == stamp:
            return known
        if bad is not None and bad[0] == stamp:
            return bad
        try:
            return Segment(path, SHARED, self._known_sites)
        except RunDamaged as error:
            return stamp, str(error)

    def close(self) -> None:
        """Close all files. What is asked later opens them again."""
        for segment in self.segments.values():
            SHARED.drop(segment)

    def _arrange(self) -> None:
        sources: list[Segment | JournalSource] = [*self.segments.values(), *self.journals.values()]
        self.attempts = attempts.merge(attempt for source in sources for attempt in source.attempts)
        self.sites, self.parts = {}, []
        seen: list[Site] | None = None
        for source in sources:
            last = max((attempt.number for attempt in source.attempts), default=0)
            limit = attempts.replaced_from(self.attempts, last)
            if isinstance(source, Segment):
                if source.sites is not seen:  # neighbours mostly share the very same list
                    self.sites.update((site.id, site) for site in source.sites)
                seen = source.sites
                self.parts.append(Part(source.blocks, limit, source, None))
            else:
                self.sites.update(source.sites)
                self.parts.extend(Part(part.blocks, limit, None, part) for part in source.tables)
        joined = table.concat_blocks([_before(part.blocks, part.limit) for part in self.parts])
        self.blocks = joined.take(table.last_of_each([joined.step]))

    def readings(
        self, ids: list[int], columns: tuple[int, ...], *, bins: bool, start: int | None, stop: int | None
    ) -> Readings:
        """Return the readings of a site (with any of `ids`), reading only the given columns.

        Raises:
            FileNotFoundError: A segment was compacted or thinned; `refresh` and ask again.

        """
        found = list(self._pieces(ids, columns, bins=bins, start=start, stop=stop))
        step = join([rows.step[cut] for rows, cut in found], "i8")
        keep: Any = slice(None)
        if len(step) > 1 and not (step[1:] > step[:-1]).all():
            keep = table.last_of_each([step])
        # Column by column in memory: those that were not requested stay untouched zeros, which cost nothing.
        stats = np.zeros((schema.NUM_COLUMNS, len(step)))
        for column in columns:
            stats[column] = join([rows.stats[column][cut] for rows, cut in found], "f8")
        lengths = join([rows.hist_len[cut] for rows, cut in found], "u1")
        all_bins = _bins(found, lengths) if bins else None
        return Readings(
            step=step[keep],
            span=join([rows.span[cut] for rows, cut in found], "u4")[keep],
            merged=join([rows.merged[cut] for rows, cut in found], "u4").astype(np.float64)[keep],
            rows=stats.T[keep],
            bins=None if all_bins is None else all_bins[keep],
            binned=(lengths > 0)[keep],
        )

    def _pieces(
        self, ids: list[int], columns: tuple[int, ...], *, bins: bool, start: int | None, stop: int | None
    ) -> Iterator[tuple[Table, slice]]:
        places = [
            (part, at)
            for part in self.parts
            if _overlaps(part.blocks, start, _least(stop, part.limit))
            for number in ids
            if (at := table.find_site(part.site(), number)) is not None
        ]
        for part, at in places:
            if part.segment is not None:
                part.segment.prefetch(np.array([at]), columns)
        for part, at in places:
            rows, place = part.loaded, at
            if part.segment is not None:
                loaded = self._load(part.segment, np.array([at]), columns, bins=bins)
                rows, place = (None if loaded is None or not loaded.sound.all() else loaded.rows), 0
            if rows is not None:
                cut = _cut(rows, place, start, _least(stop, part.limit))
                if cut.start < cut.stop:
                    yield rows, cut

    def readings_of(
        self, wanted: list[list[int]], columns: tuple[int, ...], *, start: int | None, stop: int | None
    ) -> list[Readings]:
        """Return the readings of many sites, each named by its ids, as `readings` does for one; without bins.

        Raises:
            FileNotFoundError: A segment was compacted or thinned; `refresh` and ask again.

        """
        numbers = np.array([number for ids in wanted for number in ids], dtype=np.int64)
        owners = np.repeat(np.arange(len(wanted)), [len(ids) for ids in wanted])
        places = []
        for part in self.parts:
            if not _overlaps(part.blocks, start, _least(stop, part.limit)):
                continue
            at, which = find_rows(part.site(), numbers)
            if len(at):
                places.append((part, at, which))
                if part.segment is not None:
                    part.segment.prefetch(at, columns)
        finds = []
        for part, at, which in places:
            if part.segment is None:
                finds.append(Found(part.rows(), at, owners[which], part.limit))
            elif (loaded := self._load(part.segment, at, columns)) is not None:
                sound = np.flatnonzero(loaded.sound)
                finds.append(Found(loaded.rows, sound, owners[which[sound]], part.limit))
        return gather_rows(finds, len(wanted), columns, start, stop)

    def _load(
        self, segment: Segment, at: NDArray[np.intp], columns: tuple[int, ...], *, bins: bool = False
    ) -> Loaded | None:
        """Read some sites of a segment. What does not match its checksum is named in `problems`, to be left out."""
        try:
            loaded = segment.load(at, columns, bins=bins)
        except RunDamaged as error:
            self._damage[str(error)] = None
            return None
        self._damage.update(dict.fromkeys(loaded.problems))
        return loaded

    def at(self, step: int) -> Snapshot:
        """Return the reading of each site that covers a step; the newest one wins.

        Raises:
            FileNotFoundError: A segment was compacted or thinned; `refresh` and ask again.

        """
        found = Snapshot.none()
        for part in self.parts:
            if not _reaches(part.blocks, step) or (part.limit is not None and step >= part.limit):
                continue
            try:
                rows = part.rows()
                if part.segment is not None:
                    part.segment.check_all(rows)
            except RunDamaged as error:
                self._damage[str(error)] = None
                continue
            found = found.update(Snapshot.of(rows, *rows.covering(step)))
        return found


def _before(blocks: Blocks, limit: int | None) -> Blocks:
    return blocks if limit is None else blocks.take(np.flatnonzero(blocks.step < limit))


def _overlaps(blocks: Blocks, start: int | None, stop: int | None) -> bool:
    if not len(blocks) or (stop is not None and int(blocks.step[0]) >= stop):
        return False
    return start is None or int(blocks.step[-1]) >= start


def _reaches(blocks: Blocks, step: int) -> bool:
    return bool(len(blocks)) and int(blocks.step[0]) <= step < int(blocks.step[-1]) + int(blocks.span[-1])


def _least(left: int | None, right: int | None) -> int | None:
    return min((value for value in (left, right) if value is not None), default=None)


def _cut(rows: Table, at: int, start: int | None, stop: int | None) -> slice:
    first, last = int(rows.offset[at]), int(rows.offset[at + 1])
    steps = rows.step[first:last]
    low = 0 if start is None else int(np.searchsorted(steps, start))
    high = len(steps) if stop is None else int(np.searchsorted(steps, stop))
    return slice(first + low, first + high)


def _bins(found: list[tuple[Table, slice]], lengths: NDArray[np.uint8]) -> NDArray[np.uint64]:
    lo = join([rows.hist_lo[cut] for rows, cut in found], "u1")
    counts = [rows.hist[int(rows.hist_offset[cut.start]) : int(rows.hist_offset[cut.stop])] for rows, cut in found]
    return codec.unpack_bins(lo, lengths, join(counts, "u4"))[0]


Index = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Found:
    """Where some of the wanted sites lie in one table, and the step from which its readings do not count."""

    rows: Table
    at: Index
    """The places of the sites in the table, in rising order."""
    wanted: Index
    """Which of the wanted sites each of them is."""
    limit: int | None


def find_rows(sites: NDArray[np.uint32], numbers: NDArray[np.int64]) -> tuple[Index, Index]:
    """Return the places of some numbers in a rising list of sites, rising too, and which of the numbers each is."""
    if not len(sites):
        return np.zeros(0, np.intp), np.zeros(0, np.intp)
    place = np.minimum(np.searchsorted(sites, numbers), len(sites) - 1)
    known = np.flatnonzero(sites[place] == numbers)
    order = known[np.argsort(place[known], kind="stable")]
    return place[order], order


def gather_rows(
    finds: Iterable[Found], count: int, columns: Sequence[int], start: int | None, stop: int | None
) -> list[Readings]:
    """Return the readings of `count` sites, in order of steps; of two for the same step the later one stays."""
    pieces = [_piece(found, columns, start, stop) for found in finds]
    owner = join([piece.owner for piece in pieces], "u4")
    order = np.argsort(owner.astype(np.uint16) if count < 1 << 16 else owner, kind="stable")
    bounds = np.searchsorted(owner[order], np.arange(count + 1)).tolist()
    step, span, merged, binned = (
        join([getattr(piece, name) for piece in pieces], dtype)[order]
        for name, dtype in (("step", "i8"), ("span", "u4"), ("merged", "u4"), ("binned", "?"))
    )
    # Column by column in memory: those that were not requested stay untouched zeros, which cost nothing.
    stats = np.zeros((schema.NUM_COLUMNS, len(order)))
    for place, column in enumerate(columns):
        np.take(join([piece.stats[place] for piece in pieces], "f8"), order, out=stats[column], mode="clip")
    out = []
    for first, last in pairwise(bounds):
        mine = slice(first, last)
        keep: Any = slice(None)
        if last - first > 1 and not (step[mine][1:] > step[mine][:-1]).all():
            keep = table.last_of_each([step[mine]])
        out.append(
            Readings(
                step=step[mine][keep],
                span=span[mine][keep],
                merged=merged[mine].astype(np.float64)[keep],
                rows=stats[:, mine].T[keep],
                bins=None,
                binned=binned[mine][keep],
            )
        )
    return out


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one table has of the wanted sites, site by site."""

    owner: NDArray[np.uint32]
    step: NDArray[np.int64]
    span: NDArray[np.uint32]
    merged: NDArray[np.uint32]
    binned: NDArray[np.bool_]
    stats: list[NDArray[np.float64]]


def _piece(found: Found, columns: Sequence[int], start: int | None, stop: int | None) -> _Piece:
    rows = found.rows
    first, last = rows.offset[found.at].astype(np.intp), rows.offset[found.at + 1].astype(np.intp)
    lengths = last - first
    # The rows of each site in turn: its first one, and how far inside its own part each is.
    before = np.cumsum(lengths) - lengths
    index = np.repeat(first - before, lengths) + np.arange(int(lengths.sum()))
    owner = np.repeat(found.wanted, lengths).astype(np.uint32)
    step = rows.step[index]
    least = min((each for each in (stop, found.limit) if each is not None), default=None)
    if start is not None or least is not None:
        inside = np.ones(len(step), bool) if start is None else step >= start
        inside &= True if least is None else step < least
        index, owner, step = index[inside], owner[inside], step[inside]
    return _Piece(
        owner, step, rows.span[index], rows.merged[index], rows.hist_len[index] > 0,
        [rows.stats[column][index] for column in columns],
    )  # fmt: skip
