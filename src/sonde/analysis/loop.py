"""Summarize the training loop of a run: where step time went, and whether memory grows. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from sonde.analysis.downsample import Steps, Values
from sonde.core import signals
from sonde.core.robust import Growth, growth, less
from sonde.store.log.reader import Run
from sonde.store.series import Series

# --------------------------------------------------------------------------------
# Where the time of a run's steps went. Reads what the session recorded about the loop; no torch.


# The first steps build caches, compile and fill the loader's queue; they say little about the rest.
_WARM_UP: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseShares:
    """How the time of a step is divided, over some steps of a run."""

    step_s: float
    """Seconds of a step: the median."""
    mean_s: float
    """The mean, which the shares divide."""
    shares: dict[str, float]
    """Share of the steps' total time by phase, largest first: `data_wait`, `forward`, `backward`, `optimizer`, ..."""
    steps: int
    """Over how many recorded steps; taped ones are left out, since taping slows them."""
    unexplained: float
    """The share that no recorded phase covers."""


def phase_shares(run: Run, *, first: int | None = None, last: int | None = None) -> PhaseShares | None:
    """Return the shares between two steps; by default of the whole run but its first three steps.

    None if the run has no step times: it was recorded without a diagnosis, or has fewer than two steps.
    """
    step_time = phase_series(run, signals.STEP_TIME)
    if step_time is None:
        return None
    begin = first if first is not None else _after_warm_up(step_time[0])
    end = last if last is not None else int(step_time[0][-1])
    taped = run.tapes()
    whole = _within(step_time, begin, end, taped)
    if not len(whole) or not whole.sum() > 0:
        return None
    names = {"data_wait": signals.DATA_WAIT} | {phase: signals.time_of(phase) for phase in signals.PHASE_TIMES}
    totals = {}
    for phase, name in names.items():
        series = phase_series(run, name)
        if series is not None:
            totals[phase] = float(_within(series, begin, end, taped).sum())
    shares = {phase: total / float(whole.sum()) for phase, total in totals.items()}
    return PhaseShares(
        step_s=float(np.median(whole)),
        mean_s=float(whole.mean()),
        shares=dict(sorted(shares.items(), key=lambda item: -item[1])),
        steps=len(whole),
        unexplained=max(0.0, 1.0 - sum(shares.values())),
    )


def phase_series(run: Run, name: str) -> tuple[Steps, Values] | None:
    """Return steps and seconds of one vital of the loop, or None if it was never recorded."""
    key = f"{signals.LOOP}:vital{signals.part_of(name)}"
    if not any(site.key == key for site in run.sites):
        return None
    series = run.series(key, "mean")
    return (series.steps, series.values) if len(series.steps) else None


def _after_warm_up(steps: Steps) -> int:
    return int(steps[min(_WARM_UP, max(len(steps) - 2, 0))])


def _within(series: tuple[Steps, Values], first: int, last: int, taped: list[int]) -> Values:
    steps, values = series
    kept: Values = values[(steps >= first) & (steps <= last) & np.isfinite(values) & ~np.isin(steps, taped)]
    return kept


# --------------------------------------------------------------------------------
# Does a run's memory grow without end? Reads the memory that the session recorded; no torch.


# Growth over the run below this is not reported: allocators keep some of the memory that is freed.
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
