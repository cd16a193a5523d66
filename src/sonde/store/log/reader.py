"""Read a run, all ranks as one, while it is written or later."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.core import files, statistics, tape
from sonde.core.schema import Bins
from sonde.core.tape import Tape
from sonde.errors import OptionError, RunDamaged
from sonde.records import Block, Event, Finding, Reading, RunHeader, Site
from sonde.store import contents, header, layout, lease, series, timeline
from sonde.store.lines import Memory
from sonde.store.log import export, sites
from sonde.store.log.all_ranks import AllRanks
from sonde.store.log.attempts import Attempt
from sonde.store.log.table import Blocks
from sonde.store.remote import mirror
from sonde.store.series import ALL_COLUMNS, Readings, Series
from sonde.store.timeline import EventFile, FindingFile

if TYPE_CHECKING:
    import pandas
    import pyarrow

_NOTEBOOK: Final = "sonde.views.notebook"  # imported by name: the store knows nothing of views
_MOST_ROWS: Final = 400_000  # readings that are gathered in one go: some 30 MB for a usual statistic


def open_run(path: str | Path, *, rank: int | None = None, clock: Callable[[], float] = time.time) -> Run:
    """Open a run for reading, finished or not.

    Args:
        path: The folder of the run, or its address in an object store, such as `s3://bucket/runs/first`.
        rank: Read only what this rank wrote; None reads all ranks as one.
        clock: Returns the time in seconds since the epoch.

    Raises:
        OptionError: The run has no such rank.
        RunNotFound: There is no run at the path.
        RunDamaged: Its `run.json` cannot be read.

    """
    given: Any = path
    if not isinstance(given, str | os.PathLike):
        raise OptionError(f"open_run takes the folder of a run, such as 'runs/first'; got {given!r:.80}.")
    return Run(path, rank=rank, clock=clock)


class Run:
    """A run on disk. Reading never changes a file; `refresh` brings in what was written since.

    What cannot be read is left out and named in `problems`; the rest stays readable.
    """

    def __init__(self, path: str | Path, *, rank: int | None = None, clock: Callable[[], float] = time.time) -> None:
        self.path = mirror.local_path(path)
        self.header: RunHeader = header.read_header(self.path)
        self._clock = clock
        self._lock = threading.Lock()  # a viewer asks from several threads
        self._only = rank
        self._ranks = AllRanks(self.path, rank)
        self._memory = Memory()
        self._event_files: dict[int, EventFile] = {}
        self._finding_files: dict[int, FindingFile] = {}
        self.refresh()
        if rank is not None and rank not in self._ranks.folders:
            known = layout.ranks(self.path)
            raise OptionError(f"{self.path} has no rank {rank}; it has {_some(known)}.")

    def __repr__(self) -> str:
        here = files.short(self.path) if self.address == str(self.path) else self.address
        return f"<Run {here} ({self.status}, {int((self.steps > 0).sum())} steps, {len(self.sites)} sites)>"

    # ------------------------------------------------------------------ the run as a whole

    @property
    def address(self) -> str:
        """Where the run is: its folder, or its address in an object store."""
        return mirror.shown(self.path)

    def refresh(self) -> bool:
        """Read what was written since; return whether there was anything. Call it to follow a live run."""
        mirror.bring(self.path)
        with self._lock:
            changed = self._ranks.refresh()
            for rank in {0, *self._ranks.folders} if self._only is None else {self._only}:
                events, findings = layout.events_file(self.path, rank), layout.findings_file(self.path, rank)
                changed |= self._event_files.setdefault(rank, EventFile(events, self._memory)).refresh()
                changed |= self._finding_files.setdefault(rank, FindingFile(findings, self._memory)).refresh()
            return changed

    def close(self) -> None:
        """Close all files. What is asked later opens them again."""
        self._ranks.close()

    @property
    def status(self) -> lease.Status:
        """What became of the writers: `live`, `finished`, `interrupted`, `failed` or `crashed`. Looked up each time."""
        now = self._clock()
        return lease.together(_status(folder.path, now) for folder in self._ranks.folders.values())

    @property
    def ranks(self) -> list[int]:
        """The ranks that wrote."""
        return sorted(self._ranks.folders)

    @property
    def sites(self) -> list[Site]:
        """All sites, each once however many ranks have it. Their ids count over the whole run."""
        return list(self._ranks.directory.sites)

    @property
    def blocks(self) -> Blocks:
        """One line a step: `step`, `time`, `epoch` (-1: none), `skipped`, `span`."""
        return self._ranks.blocks

    def blocks_of(self, rank: int) -> Blocks:
        """Return one line a step, as one rank recorded it."""
        return self._ranks.folders[rank].blocks

    @property
    def steps(self) -> NDArray[np.int64]:
        """The steps that were recorded, in order."""
        return self.blocks.step

    @property
    def events(self) -> list[Event]:
        """The events of all ranks, in order of time."""
        found = [event for _, file in sorted(self._event_files.items()) for event in file.events]
        return sorted(found, key=lambda event: event.timestamp)

    @property
    def findings(self) -> list[Finding]:
        """What was found wrong while the run was recorded, best first. `sonde.diagnose` looks at the run anew."""
        # The lowest rank comes last, so its version of a kind wins.
        files = [file for _, file in sorted(self._finding_files.items(), reverse=True)]
        return timeline.current_findings(finding for file in files for finding in file.items)

    @property
    def closed_findings(self) -> list[Finding]:
        """What was found while it ran and no longer held later, with the steps at which it did."""
        return timeline.closed_findings(
            finding for rank in sorted(self._finding_files) for finding in self._finding_files[rank].items
        )

    @property
    def attempts(self) -> list[Attempt]:
        """The attempts of the lowest rank: one, and one for each time the run was resumed."""
        return self._ranks.folders[min(self._ranks.folders)].attempts if self._ranks.folders else []

    @property
    def problems(self) -> list[str]:
        """What could not be read and is left out; each entry names the file. `verify` looks at everything."""
        bad = [file.bad_lines for file in self._event_files.values()]
        bad += [file.bad_lines for file in self._finding_files.values()]
        lines = [what for lines in bad for _, what in lines]
        return [*(problem for rank in self.ranks for problem in self._ranks.folders[rank].problems), *lines]

    @property
    def dropped(self) -> int:
        """How many blocks the writers could not write."""
        counts = (event.data.get("blocks", 0) for event in self.events if event.event_type == "dropped")
        return sum(count for count in counts if type(count) is int)

    @property
    def nbytes(self) -> int:
        """How many bytes the files of the run hold; a run's folder may hold other things, which do not count."""
        try:
            beside = [self.path / name for name in contents.beside_telemetry(self.path)]
        except OSError:
            beside = []  # the folder is gone
        inside = (file for folder in self._ranks.folders.values() for file in folder.path.glob("*"))
        return sum(map(_size, (*beside, *inside)))

    def tapes(self) -> list[int]:
        """Return the steps of which every operation was recorded; see `tape`."""
        return list(tape.folders(self.path))

    def tape(self, step: int | None = None) -> Tape:
        """Return the tape of a step: all its operations and what they were given; by default the last tape.

        Raises:
            RunNotFound: The run has no tapes.
            OptionError: It has none of that step.
            RunDamaged: It cannot be read.

        """
        return tape.read(tape.find(self.path, step))

    def show(self, *, height: int = 760, live: bool = False) -> Any:
        """Show the run in a notebook: findings first, then the figures, in a frame of `height` pixels.

        Figures need plotly (`pip install 'sonde[view]'`); without it the frame has words only. `live=True` shows a
        smaller page without Plotly, which is drawn again while the run trains.
        """
        notebook = import_module(_NOTEBOOK)
        if not live:
            return notebook.RunView(self, height=height)
        notebook.LiveView(self, height=height).start()
        return None

    def _repr_html_(self) -> str:
        html: str = import_module(_NOTEBOOK).brief_html(self)
        return html

    # ------------------------------------------------------------------ sites

    def find(self, pattern: str) -> list[Site]:
        """Return the sites with this key or name, or that match a glob (`*.weight:gradient`) or a regex (`re:...`).

        Raises:
            SelectionError: Nothing matches, or the regular expression cannot be read.

        """
        return sites.find(self._ranks.directory.sites, pattern, self.path)

    def site(self, which: Site | str) -> Site:
        """Return the one site that `which` means.

        Raises:
            SelectionError: It means none, or several.

        """
        key = which.key if isinstance(which, Site) else which
        known = self._ranks.directory.by_key.get(key)
        return known if known is not None else sites.find_one(self._ranks.directory.sites, key, self.path)

    def ranks_of(self, site: Site) -> list[int]:
        """Return the ranks that recorded a site."""
        return sorted(self._ranks.places(self.site(site)))

    def holdings_of(self, site: Site | str) -> dict[int, str]:
        """Return by rank what it holds of a site: ranks with the same text hold copies of the same elements.

        The first word is the kind: `replica`, `shard` (with its coordinates), `partial`, `stage`, `own`, or `data` for
        a rank's own data.
        """
        return dict(self._ranks.holdings(self.site(site)))

    # ------------------------------------------------------------------ readings

    def series(
        self,
        site: Site | str,
        stat: str = "mean",
        *,
        rank: int | None = None,
        start: int | None = None,
        stop: int | None = None,
    ) -> Series:
        """Return one statistic of one site over the steps.

        Args:
            site: A site, its key, or a pattern that only it matches.
            stat: A name in `sonde.core.statistics`; `"value"` for scalars (their mean); or, for an update, `"ratio"`:
                its norm over the norm of its parameter.
            rank: Whose readings; None takes all ranks together: shards and the ranks' own data are merged, of copies
                one counts.
            start: The first step.
            stop: The step before which to end.

        Raises:
            SelectionError: No site matches, or several do.
            OptionError: There is no such statistic.

        """
        found = self.site(site)
        row = statistics.find(stat)
        if row.quantity not in (None, found.quantity):
            raise OptionError(f"{stat!r} is a statistic of sites of kind {row.quantity}, not of {found.key}.")
        if row.over is not None:
            update = self.series(found, "norm", rank=rank, start=start, stop=stop)
            weight = self.series(f"{found.name}:{row.over}", "norm", rank=rank, start=start, stop=stop)
            return series.ratio_of(update, weight)
        bins = row.quantile is not None
        readings = self.stored(found, row.needs, bins=bins, rank=rank, start=start, stop=stop)
        return Series(found, stat, readings.step, series.compute(stat, readings), readings.span)

    def histogram(
        self, site: Site | str, *, rank: int | None = None, start: int | None = None, stop: int | None = None
    ) -> tuple[NDArray[np.int64], Bins]:
        """Return the steps at which the site has a histogram, and its 64 bins at each of them."""
        found = self.stored(self.site(site), (), bins=True, rank=rank, start=start, stop=stop)
        assert found.bins is not None
        return found.step[found.binned], found.bins[found.binned]

    def readings(
        self, site: Site | str, *, rank: int | None = None, start: int | None = None, stop: int | None = None
    ) -> Iterator[Reading]:
        """Yield the readings of a site in order of steps."""
        found = self.stored(self.site(site), ALL_COLUMNS, bins=True, rank=rank, start=start, stop=stop)
        assert found.bins is not None
        for i in range(len(found)):
            bins = found.bins[i] if found.binned[i] else None
            yield Reading(found.rows[i], bins, int(found.step[i]), int(found.span[i]))

    def at(self, step: int, *, rank: int | None = None) -> dict[Site, Reading]:
        """Return what every site read at a step; a reading of merged steps counts for each of them."""
        shot = self._ranks.at(step, rank)
        spans = zip(shot.step.tolist(), shot.span.tolist(), strict=True)
        known = {
            number: Reading(shot.rows[i], shot.bins[i] if shot.binned[i] else None, *when)
            for i, (number, when) in enumerate(zip(shot.site.tolist(), spans, strict=True))
        }
        directory = self._ranks.directory
        sources = (
            (site, directory.source(site).id if site.same_as is not None else site.id) for site in directory.sites
        )
        return {site: known[number] for site, number in sources if number in known}

    def block(self, step: int, *, rank: int | None = None) -> Block:
        """Return what every site read at a step as arrays, as a recorder would hand it to a sink; maybe empty."""
        shot = self._ranks.at(step, rank)
        order = np.argsort(shot.site, kind="stable")
        blocks = self.blocks
        line = int(np.searchsorted(blocks.step, step))
        known = line < len(blocks.step) and int(blocks.step[line]) == step
        epoch = int(blocks.epoch[line]) if known else -1
        return Block(
            step=step,
            time=float(blocks.time[line]) if known else float("nan"),
            sites=shot.site[order].astype(np.uint32),
            rows=shot.rows[order],
            bins=shot.bins[order],
            binned=shot.binned[order],
            epoch=None if epoch < 0 else epoch,
            skipped=bool(blocks.skipped[line]) if known else False,
        )

    def stored(
        self,
        site: Site,
        columns: tuple[int, ...],
        *,
        bins: bool,
        rank: int | None = None,
        start: int | None = None,
        stop: int | None = None,
    ) -> Readings:
        """Return the stored readings of a site as arrays, reading only some columns: all else is made of these."""
        return self._ranks.stored(self.site(site), columns, bins=bins, rank=rank, start=start, stop=stop)

    def stored_many(
        self,
        sites: Sequence[Site],
        columns: tuple[int, ...],
        *,
        rank: int | None = None,
        start: int | None = None,
        stop: int | None = None,
    ) -> Iterator[Readings]:
        """Yield the stored readings of many sites, as `stored` returns those of one, without bins; some at a time."""
        together = max(1, _MOST_ROWS // max(len(self.steps), 1))
        for first in range(0, len(sites), together):
            some = [self.site(site) for site in sites[first : first + together]]
            yield from self._ranks.stored_many(some, columns, rank=rank, start=start, stop=stop)

    # ------------------------------------------------------------------ tables

    def to_pandas(self, pattern: str | None = None, *, stats: Sequence[str] | None = None) -> pandas.DataFrame:
        """Return a line for each reading of each rank: step, span, time, epoch, rank, site, name, quantity, columns.

        Args:
            pattern: Which sites (see `find`); None for all.
            stats: Statistics to compute (see `sonde.core.statistics`); None for the stored columns.

        """
        return export.to_pandas(self, self._chosen(pattern), stats)

    def to_arrow(self, pattern: str | None = None, *, stats: Sequence[str] | None = None) -> pyarrow.Table:
        """Return the same table as `to_pandas`, in Arrow's form."""
        return export.to_arrow(self, self._chosen(pattern), stats)

    def _chosen(self, pattern: str | None) -> list[Site]:
        chosen = self._ranks.directory.sites if pattern is None else self.find(pattern)
        # One that only passes on another's tensor would repeat its lines.
        return [site for site in chosen if site.same_as is None or pattern is not None]


def _some(ranks: list[int]) -> str:
    """Write which ranks there are."""
    if not ranks:
        return "none"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks, {ranks[0]} to {ranks[-1]}"


def _status(folder: Path, now: float) -> lease.Status:
    try:
        return lease.status(lease.read(folder), now)
    except RunDamaged:
        return "crashed"


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
