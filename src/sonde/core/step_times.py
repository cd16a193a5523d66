"""Step times by phase: a small file per rank, and how the times of ranks compare.

A record covers the interval from one optimizer step to the next: it begins when the optimizer begins its step, because
that is where ranks that train together have just waited for each other. The file is bounded: when it is full,
neighbouring records are merged and each new record covers twice as many steps. All ranks merge at the same step
numbers, so their records stay comparable.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.core import files
from sonde.core.files import replacing
from sonde.errors import RunDamaged

PHASES: Final = (
    "optimizer",
    "evaluation",
    "data_wait",
    "to_device",
    "forward",
    "other",
    "watching",
    "backward",
    "communication",
)
"""The parts of an interval, in the order in which a training loop runs them. `communication` is the time in calls of
torch.distributed, and from the last own gradient to the end of the backward pass, where DDP waits for reductions."""
_MOST_RANKS: Final = 0.9  # of the ranks must have recorded a step, or it is not compared
_ALONE: Final = ("evaluation", "data_wait", "watching")
"""Phases in which no rank waits for another; a collective inside them counts as communication."""
FILE: Final = "steps.bin"
CAPACITY: Final = 4096
"""How many records a file holds before it is merged; 64 bytes each."""
RECORD: Final = np.dtype(
    [
        *(("step", "<i8"), ("steps", "<u4"), ("longest", "<f4"), ("time", "<f8")),
        *(("seconds", "<f4", (len(PHASES),)), ("spare", "<u4")),
    ]
)
_MAGIC: Final = b"SNDSTEPS"
_HEADER: Final = struct.Struct("<8sII")  # magic, version, steps of a record

Records = NDArray[np.void]
Times = NDArray[np.float64]


# --------------------------------------------------------------------------------
# The file.


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The records of one rank, in order of steps. `stride` is how many steps a record covers."""

    stride: int
    records: Records

    def merged(self, stride: int) -> StepTimes:
        """Return the same times with at least `stride` steps in each record."""
        if stride <= self.stride or not len(self.records):
            return StepTimes(max(stride, self.stride), self.records)
        return StepTimes(stride, _merge(self.records, stride))


class StepTimesFile:
    """Appends the times of steps to a rank's file, within its bound. Used by one thread."""

    def __init__(self, folder: Path, capacity: int = CAPACITY) -> None:
        self._path = folder / FILE
        self._capacity = capacity
        self._stride = 1
        self._waiting = np.zeros(0, RECORD)
        self._written = 0
        if self._path.is_file():  # a run that is continued
            known = read(folder)
            self._stride, self._written = (known.stride, len(known.records)) if known is not None else (1, 0)

    def append(self, steps: Sequence[tuple[int, float, Mapping[str, float]]]) -> None:
        """Append steps, given as number, time of day at the end, and seconds by phase; in rising order.

        Raises:
            OSError: The file cannot be written.

        """
        if not steps:
            return
        new = np.zeros(len(steps), RECORD)
        for at, (step, time, seconds) in enumerate(steps):
            spent = [seconds.get(phase, 0.0) for phase in PHASES]
            new[at] = (step, 1, sum(spent), time, spent, 0)
        waiting = np.concatenate([self._waiting, new])
        if self._stride > 1:
            waiting = _merge(waiting, self._stride)
        # The last window may still grow.
        is_whole = waiting["step"] // self._stride < (int(steps[-1][0]) + 1) // self._stride
        self._write(waiting[is_whole])
        self._waiting = waiting[~is_whole]

    def close(self) -> None:
        """Write the last window, though it may not be full."""
        self._write(self._waiting)
        self._waiting = self._waiting[:0]

    def _write(self, records: Records) -> None:
        if not len(records):
            return
        if not self._path.is_file():
            with replacing(self._path, sync=False) as file:
                file.write(_HEADER.pack(_MAGIC, 1, self._stride))
        with self._path.open("ab") as file:
            file.write(records.tobytes())
        self._written += len(records)
        if self._written >= self._capacity:
            self._halve()

    def _halve(self) -> None:
        known = read(self._path.parent)
        if known is None:
            return
        halved = known.merged(2 * known.stride)
        with replacing(self._path, sync=False) as file:
            file.write(_HEADER.pack(_MAGIC, 1, halved.stride) + halved.records.tobytes())
        self._stride, self._written = halved.stride, len(halved.records)


def read(folder: Path, last: int | None = None) -> StepTimes | None:
    """Read a rank's times, or the last so many records of them; None where there are none.

    Raises:
        RunDamaged: The file is something else.

    """
    path = folder / FILE
    try:
        with files.open_file(path) as file:
            head = file.read(_HEADER.size)
            if last is not None:
                size = file.seek(0, 2) - _HEADER.size
                file.seek(_HEADER.size + max(0, size // RECORD.itemsize - last) * RECORD.itemsize)
            body = file.read(2 * CAPACITY * RECORD.itemsize)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if len(head) < _HEADER.size or head[: len(_MAGIC)] != _MAGIC:
        raise RunDamaged(f"{path} does not hold the times of steps.")
    stride = int(_HEADER.unpack(head)[2])
    if not 1 <= stride < 2**31:
        raise RunDamaged(f"{path} says that a record covers {stride} steps.")
    records = np.frombuffer(body[: len(body) // RECORD.itemsize * RECORD.itemsize], RECORD)
    good = np.isfinite(records["seconds"]).all(1) & (records["steps"] > 0) & (records["step"] >= 0)
    return StepTimes(stride, records[good])


def _merge(records: Records, stride: int) -> Records:
    """Merge records that belong to the same window of `stride` steps."""
    if not len(records):
        return records
    window = records["step"] // stride
    first = np.flatnonzero(np.r_[True, window[1:] != window[:-1]])
    merged = records[first].copy()
    merged["steps"] = np.add.reduceat(records["steps"], first)
    merged["seconds"] = np.add.reduceat(records["seconds"], first, axis=0)
    merged["longest"] = np.maximum.reduceat(records["longest"], first)
    merged["time"] = np.maximum.reduceat(records["time"], first)
    return merged


# --------------------------------------------------------------------------------
# Ranks side by side.


@dataclass(frozen=True, eq=False)
class RankTimes:
    """Seconds per step of several ranks over the same steps: `spent[rank, step, phase]`; NaN where there is none."""

    ranks: NDArray[np.int64]
    steps: NDArray[np.int64]
    """The first step of each window."""
    stride: int
    spent: Times

    @property
    def step_time(self) -> Times:
        """Seconds of a step, by rank and window."""
        total: Times = self.spent.sum(2)
        return total

    def waits(self) -> Times:
        """Return how long each rank waited for others in each phase: `[rank, step, phase]`.

        Ranks leave a synchronising phase together, so a rank that enters it early stays in it longer. In each phase a
        rank waited for as long as all of these allow: the time until the last rank entered; what it spent there beyond
        the rank that was quickest in this phase; and by how much the ranks came closer together in this phase. Where
        ranks do not wait for each other, one of these is zero.
        """
        return self._waits

    @functools.cached_property
    def _waits(self) -> Times:
        entered = np.cumsum(self.spent, axis=2) - self.spent
        left = entered + self.spent
        late = np.nanmax(entered, axis=0, initial=0.0) - entered
        beyond = self.spent - np.nanmin(self.spent, axis=0, initial=np.inf)
        closer = np.maximum(_spread(entered) - _spread(left), 0.0)
        waited: Times = np.maximum(np.minimum(np.minimum(late, beyond), closer), 0.0)
        waited[:, :, [PHASES.index(phase) for phase in _ALONE]] *= 0.0
        return waited

    def own(self) -> Times:
        """Return the seconds of each rank and step without waiting for others: `[rank, step]`."""
        own: Times = self.step_time - self.waits().sum(2)
        return own


def _spread(times: Times) -> Times:
    spread: Times = np.nanmax(times, axis=0, initial=-np.inf) - np.nanmin(times, axis=0, initial=np.inf)
    return np.where(np.isfinite(spread), spread, 0.0)


def align(times: Mapping[int, StepTimes], most: int | None = None) -> RankTimes | None:
    """Put the times of ranks side by side, with at most `most` windows; None if fewer than two ranks have any."""
    known = {rank: each for rank, each in sorted(times.items()) if len(each.records)}
    if len(known) < 2:
        return None
    stride = max(each.stride for each in known.values())
    while most is not None and _count(known, stride) > most:
        stride *= 2
    merged = {rank: each.merged(stride).records for rank, each in known.items()}
    windows = np.unique(np.concatenate([each["step"] // stride for each in merged.values()]))
    spent = np.full((len(merged), len(windows), len(PHASES)), np.nan)
    for row, records in enumerate(merged.values()):
        places = np.searchsorted(windows, records["step"] // stride)
        spent[row, places] = records["seconds"] / records["steps"][:, None]
    return RankTimes(np.array(list(merged), np.int64), windows * stride, stride, spent)


def _count(times: Mapping[int, StepTimes], stride: int) -> int:
    first = min(int(each.records["step"][0]) for each in times.values())
    last = max(int(each.records["step"][-1]) for each in times.values())
    return last // stride - first // stride + 1


# --------------------------------------------------------------------------------
# Who holds the others up.


@dataclass(frozen=True, slots=True)
class Slow:
    """How much one rank slows the others, over some steps."""

    rank: int
    share: float
    """The part of the steps' time that would be saved if it were as fast as the slowest of the others."""
    saved_s: float
    """The same in seconds per step."""
    step_s: float
    """Seconds of a step."""
    phase: str
    """Where it spends the time."""
    phase_s: float
    """Its own seconds per step in that phase, over the steps in which it was slow."""
    others_s: float
    """The usual seconds of the other ranks there."""
    slow_steps: int
    """In how many steps it was the slowest by enough to matter."""
    steps: int
    """Of how many."""
    late_steps: int
    """In how many steps any rank was."""
    phase_steps: int
    """In how many steps it spent more time in that phase than the others do."""
    first: int
    last: int

    @property
    def is_constant(self) -> bool:
        """Whether it is slow in that phase in most steps."""
        return self.phase_steps >= 0.75 * self.steps


@dataclass(frozen=True, slots=True)
class Score:
    """How fast a rank is, in the manner of NVIDIA's Resiliency Extension: 1 is as it should be, less is slow."""

    rank: int
    own_s: float
    """Its own seconds per step: the median, without waiting."""
    wait_s: float
    """Seconds per step that it waits for others: the median."""
    relative: float
    """The median rank's own time over this rank's."""
    individual: float
    """This rank's own time in its best stretch over that of its last steps; 1 if nothing has changed."""


def scores(times: RankTimes) -> list[Score]:
    """Compare each rank with the others, and with its own best."""
    own = times.own()
    usual, waited = _median(own, 1), _median(times.waits().sum(2), 1)
    group = float(np.nanmedian(usual)) if np.isfinite(usual).any() else np.nan
    found = []
    for row, rank in enumerate(times.ranks.tolist()):
        best, now = _best_and_last(own[row])
        found.append(
            Score(
                rank,
                float(usual[row]),
                float(waited[row]),
                group / float(usual[row]) if usual[row] > 0 else np.nan,
                best / now if now > 0 else np.nan,
            )
        )
    return found


def _median(values: Times, axis: int) -> Times:
    """Return the median along an axis, leaving out what is NaN; several times as fast as numpy's."""
    ordered = np.sort(values, axis=axis)  # NaN comes last
    known = np.isfinite(values).sum(axis, keepdims=True)
    low, high = (np.take_along_axis(ordered, np.maximum((known - k) // 2, 0), axis) for k in (1, 0))
    middle: Times = np.where(known > 0, (low + np.where(known % 2, low, high)) / 2, np.nan).squeeze(axis)
    return middle


_STRETCH: Final = 16


def _best_and_last(own: Times) -> tuple[float, float]:
    """Return the median of the quickest stretch of steps, and that of the last one."""
    known = own[np.isfinite(own)]
    if len(known) < 2 * _STRETCH:
        return np.nan, np.nan
    whole = known[len(known) % _STRETCH :].reshape(-1, _STRETCH)
    medians = np.median(whole, axis=1)
    return float(medians.min()), float(medians[-1])


def slowest(times: RankTimes, share: float, seconds: float) -> Slow | None:
    """Return the rank that slows the others most; None if none was late, or nothing can be compared.

    Args:
        times: The ranks' times.
        share: From which part of a step on a rank's lateness counts.
        seconds: From how many seconds on it counts.

    """
    present = np.isfinite(times.spent[:, :, 0]).sum(0)
    # While a run goes on, the last steps of some ranks are not written yet: the others cannot be judged without them.
    together = present >= max(2, _MOST_RANKS * present.max(initial=0))
    spent = times.spent[:, together]
    if len(spent) < 2 or not spent.shape[1]:
        return None
    some = RankTimes(times.ranks, times.steps[together], times.stride, spent)
    waits = some.waits()
    own = np.where(np.isnan(some.spent[:, :, 0]), -np.inf, (some.spent - waits).sum(2))
    order = np.sort(own, axis=0)
    step_s = np.nanmax(some.step_time, axis=0)
    worst = own.argmax(0)
    saved = np.minimum(order[-1] - order[-2], _waited_by_others(waits.sum(2), worst))
    counts = saved > np.maximum(share * step_s, seconds)
    total = np.bincount(worst, weights=np.where(counts, saved, 0.0), minlength=len(own))
    row = int(total.argmax())
    mine = counts & (worst == row)
    if not mine.any():
        return None
    # Short delays of other ranks, as the system makes them, are not to be compared with its long ones.
    counts &= saved > np.median(saved[mine]) / 2
    mine &= counts
    own_phases = some.spent - waits
    others = _median(np.delete(own_phases, row, axis=0), 0)
    beyond = own_phases[row] - others
    phase = int(np.nanmedian(beyond[mine], axis=0).argmax())
    return Slow(
        rank=int(times.ranks[row]),
        share=float(total[row] / step_s.sum()),
        saved_s=float(total[row] / len(step_s)),
        step_s=float(step_s.mean()),
        phase=PHASES[phase],
        phase_s=float(np.nanmedian(own_phases[row, mine, phase])),
        others_s=float(np.nanmedian(others[mine, phase])),
        phase_steps=int((_beyond_others(some.spent[:, :, phase], row) > np.nanmedian(beyond[mine, phase]) / 2).sum()),
        slow_steps=int(mine.sum()),
        steps=len(step_s),
        late_steps=int(counts.sum()),
        first=int(some.steps[mine.argmax()]),
        last=int(some.steps[-1]) + times.stride - 1,
    )


def _beyond_others(spent: Times, row: int) -> Times:
    """Return by step how much longer one rank was in a phase than the usual other one, waits included."""
    beyond: Times = spent[row] - _median(np.delete(spent, row, axis=0), 0)
    return beyond


def _waited_by_others(waits: Times, worst: NDArray[np.intp]) -> Times:
    """Return how long the usual other rank waited, by step: a slow rank that no other rank waits for costs nothing."""
    others = waits.copy()
    others[worst, np.arange(waits.shape[1])] = np.nan
    return _median(others, 0)
