"""Does a run's memory grow without end? Reads the memory that the session recorded; no torch."""

from __future__ import annotations

from typing import Final

import numpy as np

from sonde.analysis.downsample import Steps, Values
from sonde.core.robust import Growth, growth, less
from sonde.store.log.reader import Run
from sonde.store.series import Series

# Growth over the run below this is not worth a word: allocators keep some of what they are given back.
LEAST_BYTES: Final = 64 << 20
_PROCESS: Final = "process.rss"
_OWN: Final = "process.sonde:scalar"


def memory_slope(steps: Steps, values: Values) -> Growth:
    """Judge a curve of bytes over steps: its slope with bounds, and whether it rises steadily."""
    return growth(np.asarray(steps, np.float64), np.asarray(values, np.float64))


def memory_slopes(run: Run) -> dict[str, Growth]:
    """Return how each memory of a run grows: `process`, `cuda:0`, ...; what was not recorded is absent."""
    found = {}
    for site in run.sites:
        place = _place(site.name) if site.quantity == "scalar" else ""
        if place:
            series = run.series(site.key, "mean")
            values = _without_sonde(run, series) if site.name == _PROCESS else series.values
            found[place] = memory_slope(series.steps, values)
    return found


def leaking(run: Run) -> dict[str, Growth]:
    """Return those memories of a run that grow steadily and by enough to matter."""
    return {place: slope for place, slope in memory_slopes(run).items() if slope.steady and slope.total >= LEAST_BYTES}


def _without_sonde(run: Run, memory: Series) -> Values:
    """Return the memory of the process less what Sonde held of it, which grows within its bounds."""
    if not any(site.key == _OWN for site in run.sites):
        return memory.values
    own = run.series(_OWN, "mean")
    return less(memory.steps, memory.values, own.steps, own.values)


def _place(name: str) -> str:
    if name == _PROCESS:
        return "process"
    place, _, what = name.rpartition(".")
    return place if what == "allocated" and place.startswith("cuda:") else ""
