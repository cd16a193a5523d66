"""Does a run's memory grow without end? Reads the memory that the session recorded; no torch."""

from __future__ import annotations

from typing import Final

import numpy as np

from sonde.analysis.downsample import Steps, Values
from sonde.growth import Growth, growth
from sonde.store.reader import Run

# Growth over the run below this is not worth a word: allocators keep some of what they are given back.
LEAST_BYTES: Final = 64 << 20
_PROCESS: Final = "process.rss"


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
            found[place] = memory_slope(series.steps, series.values)
    return found


def leaking(run: Run) -> dict[str, Growth]:
    """Return those memories of a run that grow steadily and by enough to matter."""
    return {place: slope for place, slope in memory_slopes(run).items() if slope.steady and slope.total >= LEAST_BYTES}


def _place(name: str) -> str:
    if name == _PROCESS:
        return "process"
    place, _, what = name.rpartition(".")
    return place if what == "allocated" and place.startswith("cuda:") else ""
