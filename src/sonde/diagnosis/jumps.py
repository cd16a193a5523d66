"""Find spikes and jumps of a curve, relative to its scatter just before.

A value is an event where it is far outside the scatter of the values before it and a visible factor away from them.
What a run does all the time is its noise and no event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from sonde.core.robust import MAD_TO_STD, Values
from sonde.diagnosis.rule import Threshold

Steps = NDArray[np.int64]

JUMP_HISTORY = Threshold(12, "values before it: of fewer the scatter is not known")
JUMP_DEVIATIONS = Threshold(8.0, "standard deviations, from the median absolute deviation of the values before it")
JUMP_LASTS = Threshold(3, "values in a row that are outside: then half of those deviations are enough")
JUMP_MARGIN = Threshold(1.5, "times the largest deviation before it: heavy-tailed noise has large ones")
JUMP_SCATTER = Threshold(0.01, "least scatter, as a part of the level: curves that hardly vary have none to measure by")
JUMP_RARE = Threshold(200, "steps per event: what comes more often is the curve's own noise")
RATE_FACTOR = Threshold(1.5, "a learning rate over the one before: schedules change it by less from step to step")
RATE_STEEPER = Threshold(3.0, "times the largest change of the steps before: a warm-up is steep all along")
_WINDOW: Final = 32
_RATE_WINDOW: Final = 8
_SAME: Final = 10
"""Steps within which several values far outside are one event."""
_TINY: Final = 1e-300


@dataclass(frozen=True, slots=True)
class Jump:
    """One value that left the scatter of those before it: where it came from and where it went."""

    step: int
    before: float
    """The median of the values before it; of a learning rate the value before it."""
    after: float

    @property
    def factor(self) -> float:
        """How many times the value before it is; NaN where that is not positive."""
        return self.after / self.before if self.before > 0 else float("nan")


def find_spikes(steps: Steps, values: Values, *, least_factor: float) -> list[Jump]:
    """Return where a curve rose far above its own recent scatter, at least by a factor; the highest value of each rise.

    >>> calm = 2.0 + 0.01 * np.sin(np.arange(100.0))
    >>> calm[60] = 3.4
    >>> [(jump.step, round(jump.factor, 1)) for jump in find_spikes(np.arange(100), calm, least_factor=1.2)]
    [(60, 1.7)]
    """
    known = np.isfinite(values)
    steps, values = steps[known], values[known]
    if len(values) <= JUMP_HISTORY:
        return []
    # Factors are what matters where all values are positive: noise grows with the level.
    is_positive = bool(values.min() > 0)
    shaped = np.log(values) if is_positive else values
    at = _candidates(shaped, np.log(least_factor) if is_positive else 0.0)
    level, scatter, widest = _recent(shaped, at)
    least = np.log(least_factor) if is_positive else (least_factor - 1) * np.abs(level)
    floor = float(JUMP_SCATTER) * (1.0 if is_positive else np.maximum(np.abs(level), _TINY))
    risen, lasting = shaped[at] - level, _lowest_of_next(shaped)[at] - level
    away, unit = risen / np.maximum(scatter, floor), np.maximum(scatter, floor)
    far = (away > JUMP_DEVIATIONS) & (risen > np.maximum(least, JUMP_MARGIN * widest))
    # A drift comes from outside already; a jump that lasts comes from within.
    came_from_within = (shaped[at - 1] - level) / unit < JUMP_DEVIATIONS / 4
    far |= came_from_within & (lasting / unit > JUMP_DEVIATIONS / 2) & (lasting > np.maximum(least, widest))
    far = _rare(far, away, len(values))
    usual = np.exp(level) if is_positive else level
    before = dict(zip(at.tolist(), usual.tolist(), strict=True))
    return [Jump(int(steps[top]), before[first], float(values[top])) for first, top in _grouped(at[far], steps, shaped)]


def find_rate_jumps(steps: Steps, rates: Values) -> list[Jump]:
    """Return where a learning rate changed by far more than it did from step to step before."""
    known = np.isfinite(rates) & (rates > 0)
    steps, rates = steps[known], rates[known]
    if len(rates) <= _RATE_WINDOW + 1:
        return []
    changes = np.abs(np.diff(np.log(rates)))
    before = sliding_window_view(changes, _RATE_WINDOW)[:-1].max(axis=1)
    now = changes[_RATE_WINDOW:]
    steep = (now > np.log(float(RATE_FACTOR))) & (now > RATE_STEEPER * before)
    # A schedule that ends near 0 falls by large factors in small steps, and not every step need be recorded.
    speeds = np.abs(np.diff(rates)) / np.diff(steps)
    fast = speeds[_RATE_WINDOW:] > RATE_STEEPER * sliding_window_view(speeds, _RATE_WINDOW)[:-1].max(axis=1)
    far = np.flatnonzero(steep & fast) + _RATE_WINDOW + 1
    return [Jump(int(steps[at]), float(rates[at - 1]), float(rates[at])) for at in far]


def _candidates(values: Values, least: float) -> NDArray[np.intp]:
    """Return the places of values that are so far above the lowest of those before them."""
    before = sliding_window_view(np.append(np.full(_WINDOW - 1, np.inf), values[:-1]), _WINDOW).min(axis=1)
    first = int(JUMP_HISTORY)
    return np.flatnonzero(values[first:] - before[first - 1 :] > least) + first


def _recent(values: Values, at: NDArray[np.intp]) -> tuple[Values, Values, Values]:
    """Return for values at some places the median of those before them, their scatter, and their largest deviation."""
    rows = sliding_window_view(np.append(np.full(_WINDOW, np.nan), values), _WINDOW)[at]
    middle = np.nanmedian(rows, axis=1)
    deviations = np.abs(rows - middle[:, None])
    return middle, MAD_TO_STD * np.nanmedian(deviations, axis=1), np.nanmax(deviations, axis=1, initial=0.0)


def _lowest_of_next(values: Values) -> Values:
    """Return for each value the lowest of it and the few that follow; the last ones are followed by nothing."""
    size = int(JUMP_LASTS)
    lowest: Values = sliding_window_view(np.append(values, np.full(size - 1, -np.inf)), size).min(axis=1)
    return lowest


def _rare(far: NDArray[np.bool_], away: Values, count: int) -> NDArray[np.bool_]:
    """Return which of the places that are far outside are not an everyday event of this curve."""
    if far.sum() <= max(3, count / float(JUMP_RARE)):
        return far
    result: NDArray[np.bool_] = far & (away > RATE_STEEPER * float(np.median(away[far])))
    return result


def _grouped(at: NDArray[np.intp], steps: Steps, values: Values) -> list[tuple[int, int]]:
    """Return for each group of near places its first one and the one with the highest value."""
    groups: list[list[int]] = []
    for place in at.tolist():
        if groups and steps[place] - steps[groups[-1][-1]] <= _SAME:
            groups[-1].append(place)
        else:
            groups.append([place])
    return [(group[0], max(group, key=lambda each: float(values[each]))) for group in groups]
