"""Reading a run: all ranks of it as one, while it is written or long after."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sonde import measures
from sonde.errors import OptionError, RunDamaged, RunNotFound, SelectionError
from sonde.records import Event, Reading, RunHeader, Site
from sonde.schema import Bins
from sonde.store import header, layout, lease, series, table
from sonde.store.events import EventFile
from sonde.store.folder import Attempt, RankFolder
from sonde.store.series import ALL_COLUMNS, NEEDS, Readings, Series
from sonde.store.sites import Directory
from sonde.store.table import Blocks

Ratio = "ratio"


def open_run(path: str | Path, *, clock: Callable[[], float] = time.time) -> Run:
    """Open a run for reading, finished or not.

    Raises:
        RunNotFound: There is no run at the path.
        RunDamaged: Its `run.json` cannot be read.
    """
    return Run(path, clock=clock)


class Run:
    """A run on disk. It never changes a file, and what it shows changes only with `refresh`."""

    def __init__(self, path: str | Path, *, clock: Callable[[], float] = time.time) -> None:
        self.path = Path(path)
        self._clock = clock
        self.header: RunHeader = header.read(self.path)
        self._folders: dict[int, RankFolder] = {}
        self._event_files: dict[int, EventFile] = {}
        self._directory = Directory()
        self._blocks = table.empty_blocks()
        self.refresh()

    def refresh(self) -> bool:
        """Read what was written since; say whether there was anything. A live run is followed by calling this."""
        changed = False
        for rank in layout.ranks(self.path):
            folder = self._folders.setdefault(rank, RankFolder(layout.rank_folder(self.path, rank)))
            changed |= folder.refresh()
        for rank in {0, *self._folders}:
            file = self._event_files.setdefault(rank, EventFile(layout.events_file(self.path, rank)))
            changed |= file.refresh()
        if changed:
            self._directory = Directory.merge({rank: folder.sites for rank, folder in self._folders.items()})
            joined = table.concat_blocks([folder.blocks() for _, folder in sorted(self._folders.items(), reverse=True)])
            self._blocks = joined.take(table.last_of_each([joined.step]))
        return changed

    @property
    def status(self) -> lease.Status:
        """What became of the writers: `live`, `finished`, `failed` or `crashed`."""
        now = self._clock()
        found = {lease.status(lease.read(folder.path), now) for folder in self._folders.values()}
        order: tuple[lease.Status, ...] = ("live", "failed", "crashed", "finished")
        return next((status for status in order if status in found), "crashed")

    @property
    def ranks(self) -> list[int]:
        """The ranks that wrote."""
        return sorted(self._folders)

    @property
    def sites(self) -> list[Site]:
        """All sites, each once however many ranks have it; ids count over the whole run."""
        return self._directory.sites

    @property
    def blocks(self) -> Blocks:
        """One line a step: step, time, epoch, skipped, span."""
        return self._blocks

    @property
    def steps(self) -> NDArray[np.int64]:
        """The steps that were recorded, in order."""
        return self._blocks.step

    @property
    def events(self) -> list[Event]:
        """The events of all ranks, in order of time."""
        found = [event for _, file in sorted(self._event_files.items()) for event in file.events]
        return sorted(found, key=lambda event: event.timestamp)

    @property
    def attempts(self) -> list[Attempt]:
        """The stretches of writing of the lowest rank: one, and one more for each time the run was continued."""
        return self._folders[min(self._folders)].attempts if self._folders else []

    @property
    def dropped(self) -> int:
        """How many blocks the writers say they could not write."""
        counts = (event.data.get("blocks", 0) for event in self.events if event.event_type == "dropped")
        return sum(count for count in counts if type(count) is int)

    def find(self, pattern: str) -> list[Site]:
        """Return the sites with this key or name, or that match a glob (`*.weight:gradient`) or a regex (`re:...`).

        Raises:
            SelectionError: Nothing matches, or the regex cannot be read.
        """
        exact = [site for site in self.sites if pattern in (site.key, site.name)]
        found = exact or [site for site in self.sites if _matches(pattern, site)]
        if not found:
            names = [name for site in self.sites for name in (site.key, site.name)]
            near = get_close_matches(pattern, dict.fromkeys(names), n=3, cutoff=0.4)
            hint = f" (nearest: {', '.join(near)})" if near else ""
            raise SelectionError(f"No site of {self.path} matches {pattern!r}{hint}. It has {len(self.sites)} sites.")
        return found

    def site(self, which: Site | str) -> Site:
        """Return the one site that `which` names."""
        if isinstance(which, Site):
            which = which.key
        found = self.find(which)
        if len(found) > 1:
            keys = ", ".join(site.key for site in found[:6])
            raise SelectionError(f"{which!r} means {len(found)} sites of {self.path}: {keys}. Name one by its key.")
        return found[0]

    def series(
        self,
        site: Site | str,
        stat: str = "mean",
        *,
        rank: int | None = None,
        start: int | None = None,
        stop: int | None = None,
    ) -> Series:
        """Return one statistic of one site over the steps `start` to `stop` (exclusive), merged over ranks."""
        found = self.site(site)
        if stat == Ratio:
            return self._ratio(found, rank=rank, start=start, stop=stop)
        name = "mean" if stat == "value" and found.quantity == "scalar" else stat
        measures.check_name(name, (Ratio, "value"))
        readings = self._readings(
            found, NEEDS.get(name, ALL_COLUMNS), bins=name in measures.QUANTILES, rank=rank, start=start, stop=stop
        )
        return Series(found, stat, readings.step, series.compute(name, readings), readings.span)

    def _ratio(self, site: Site, *, rank: int | None, start: int | None, stop: int | None) -> Series:
        if site.quantity != "update":
            raise OptionError(f"'ratio' is a statistic of updates (to their parameters); {site.key} is not one.")
        update = self.series(site, "norm", rank=rank, start=start, stop=stop)
        weight = self.series(f"{site.name}:parameter", "norm", rank=rank, start=start, stop=stop)
        steps, left, right = np.intersect1d(update.steps, weight.steps, assume_unique=True, return_indices=True)
        norms = weight.values[right]
        out = np.full(len(steps), np.nan)
        np.divide(update.values[left], norms, out=out, where=norms > 0)
        return Series(site, Ratio, steps, out, update.spans[left])

    def histogram(
        self, site: Site | str, *, rank: int | None = None, start: int | None = None, stop: int | None = None
    ) -> tuple[NDArray[np.int64], Bins]:
        """Return the steps at which the site has a histogram, and its 64 bins at each."""
        found = self._readings(self.site(site), (), bins=True, rank=rank, start=start, stop=stop)
        assert found.bins is not None
        return found.step[found.binned], found.bins[found.binned]

    def readings(self, site: Site | str, *, rank: int | None = None) -> Iterator[Reading]:
        """Yield the readings of a site in order of steps."""
        found = self._readings(self.site(site), ALL_COLUMNS, bins=True, rank=rank, start=None, stop=None)
        assert found.bins is not None
        for i in range(len(found)):
            bins = found.bins[i] if found.binned[i] else None
            yield Reading(found.rows[i], bins, int(found.step[i]), int(found.span[i]))

    def at(self, step: int, *, rank: int | None = None) -> dict[Site, Reading]:
        """Return what every site read at a step; a reading of merged steps stands for each of them."""
        result = {}
        for site in self.sites:
            for reading in self.readings(site, rank=rank):
                if reading.step <= step < reading.step + reading.span:
                    result[site] = reading
        return result

    def _readings(
        self, site: Site, columns: tuple[int, ...], *, bins: bool, rank: int | None, start: int | None, stop: int | None
    ) -> Readings:
        places = self._directory.places[self._directory.source(site).key]
        wanted = {r: ids for r, ids in sorted(places.items()) if rank in (None, r)}
        if len(wanted) > 1:
            columns = ALL_COLUMNS  # merging needs them all
        parts = [
            self._folders[r].readings(ids, columns, bins=bins, start=start, stop=stop) for r, ids in wanted.items()
        ]
        if len(parts) == 1:
            return parts[0]
        return (
            series.merge_overlapping(parts)
            if parts
            else RankFolder(self.path).readings([], columns, bins=bins, start=start, stop=stop)
        )


def _matches(pattern: str, site: Site) -> bool:
    names = (site.key, site.name, *site.aliases)
    if pattern.startswith("re:"):
        try:
            return any(re.search(pattern[3:], name) for name in names)
        except re.error as error:
            raise SelectionError(f"{pattern!r} is not a regular expression: {error}") from None
    return any(fnmatchcase(name, pattern) for name in names)


__all__ = ["Attempt", "Blocks", "RunDamaged", "RunNotFound", "Run", "Series", "open_run"]
