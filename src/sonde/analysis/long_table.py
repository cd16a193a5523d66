"""Read a run as one long table, in pieces: a row for each reading of each rank, a column for each statistic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sonde.analysis.downsample import Steps, Values
from sonde.analysis.summary import has_stat, keys_of
from sonde.core import statistics
from sonde.records import Site
from sonde.store import Run
from sonde.store.series import ALL_COLUMNS, Readings, compute

WINDOW_STEPS = 50_000


@dataclass(frozen=True, slots=True, eq=False)
class SiteRows:
    """Rows of one site on one rank. `spans` is how many steps a row covers, `epochs` is -1 where not known."""

    site: Site
    rank: int
    steps: Steps
    spans: NDArray[np.int64]
    times: Values
    epochs: NDArray[np.int64]
    stats: Mapping[str, Values]

    def __len__(self) -> int:
        return len(self.steps)


def windows(run: Run, size: int = WINDOW_STEPS) -> Iterator[tuple[int, int]]:
    """Yield ranges of steps (the end is exclusive) that cover the run, with at most `size` recorded steps in each."""
    for first in range(0, len(run.steps), size):
        part = run.steps[first : first + size]
        yield int(part[0]), int(part[-1]) + 1


def read_rows(run: Run, site: Site, stats: Sequence[str], span: tuple[int, int]) -> Iterator[SiteRows]:
    """Read the rows of one site from the first step of `span` to before the second, one piece for each rank."""
    bins = any(statistics.find(stat).quantile is not None for stat in stats)
    for rank in run.ranks_of(site):
        found = run.stored(site, ALL_COLUMNS, bins=bins, rank=rank, start=span[0], stop=span[1])
        columns = {stat: _column(run, site, stat, found, rank, span) for stat in stats}
        # A merged reading carries its first step; the row of that step may be gone.
        at = np.clip(np.searchsorted(run.blocks.step, found.step), 0, max(len(run.blocks) - 1, 0))
        times, epochs = run.blocks.time[at], run.blocks.epoch[at]
        yield SiteRows(site, rank, found.step, found.span.astype(np.int64), times, epochs, columns)


def _column(run: Run, site: Site, stat: str, found: Readings, rank: int, span: tuple[int, int]) -> Values:
    values = np.full(len(found), np.nan)
    if not has_stat(site, stat, keys_of(run)):
        return values
    if statistics.find(stat).over is not None:
        series = run.series(site, stat, rank=rank, start=span[0], stop=span[1])
        values[np.searchsorted(found.step, series.steps)] = series.values
        return values
    return compute(stat, found)
