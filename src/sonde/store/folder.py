"""One rank's folder, read: its segments and its open journal, as one list of tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde import schema
from sonde.errors import RunDamaged
from sonde.records import Site
from sonde.store import attempts, bulk, codec, layout, table
from sonde.store.attempts import Attempt
from sonde.store.journal_source import JournalSource
from sonde.store.segment import Segment
from sonde.store.segment_maps import Maps, Stamp
from sonde.store.series import Readings
from sonde.store.snapshot import Snapshot
from sonde.store.table import Blocks, Table

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
        """Return the readings, mapped from their segment if need be."""
        if self.loaded is not None:
            return self.loaded
        assert self.segment is not None
        return self.segment.table()

    def site(self) -> NDArray[np.uint32]:
        """Return the sites that have readings here."""
        return self.segment.site if self.segment is not None else self.rows().site


class RankFolder:
    """Everything one rank has written."""

    def __init__(self, path: Path, maps: Maps | None = None) -> None:
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
        self._maps = maps if maps is not None else Maps()
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
        """Read what is new; say whether there was anything.

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
                    opened.table()  # mapped at once: a busy writer may replace it before anyone asks
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
                self._maps.drop(segment)
        self.segments, self.journals, self._bad_segments = segments, journals, bad
        return grew

    def _keep(self, name: str, segment: Segment) -> None:
        old = self.segments.get(name)
        if old is not None and old is not segment:
            self._maps.drop(old)
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
            return Segment(path, self._maps, self._known_sites)
        except RunDamaged as error:
            return stamp, str(error)

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
        stats = np.zeros((len(step), schema.NUM_COLUMNS))
        for column in columns:
            stats[:, column] = join([rows.stats[column, cut] for rows, cut in found], "f8")
        lengths = join([rows.hist_len[cut] for rows, cut in found], "u1")
        all_bins = _bins(found, lengths) if bins else None
        return Readings(
            step=step[keep],
            span=join([rows.span[cut] for rows, cut in found], "u4")[keep],
            merged=join([rows.merged[cut] for rows, cut in found], "u4").astype(np.float64)[keep],
            rows=stats[keep],
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
                part.segment.prefetch(at, columns)
        for part, at in places:
            if self._is_sound(part, at, columns, bins=bins):
                rows = part.rows()
                cut = _cut(rows, at, start, _least(stop, part.limit))
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
            at, which = bulk.find(part.site(), numbers)
            if len(at):
                places.append((part, at, which))
                if part.segment is not None:
                    part.segment.prefetch_many(at, columns)
        finds = []
        for part, at, which in places:
            if part.segment is not None:
                self._damage.update(dict.fromkeys(part.segment.check_sites(part.rows(), at, columns)))
                sound = part.segment.is_sound(at, columns)
                at, which = at[sound], which[sound]
            finds.append(bulk.Find(part.rows, at, owners[which], part.limit))
        return bulk.gather(finds, len(wanted), columns, start, stop)

    def _is_sound(self, part: Part, at: int, columns: tuple[int, ...], *, bins: bool) -> bool:
        """Say whether readings are what was written; if not, they are left out and named among the problems."""
        if part.segment is None:
            return True
        try:
            part.segment.check_site(part.rows(), at, columns, bins=bins)
        except RunDamaged as error:
            self._damage[str(error)] = None
            return False
        return True

    def at(self, step: int) -> Snapshot:
        """Return the reading of each site that covers a step; the newest word counts.

        Raises:
            FileNotFoundError: A segment was compacted or thinned; `refresh` and ask again.

        """
        found = Snapshot.none()
        for part in self.parts:
            if not _reaches(part.blocks, step) or (part.limit is not None and step >= part.limit):
                continue
            rows = part.rows()
            if part.segment is not None:
                try:
                    part.segment.check_all(rows)
                except RunDamaged as error:
                    self._damage[str(error)] = None
                    continue
            found = found.update(Snapshot.of(rows, *rows.covering(step)))
        return found


def join(parts: list[NDArray[Any]], dtype: str) -> NDArray[Any]:
    """Put arrays end to end; none at all make an empty one of `dtype`."""
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


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
