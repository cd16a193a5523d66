"""Is a curve growing without end? A robust slope with its confidence, deaf to warm-up, saw teeth and single jumps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

# The share of a curve's beginning that is taken for warming up: caches, workspaces, the optimizer's state.
WARM_UP_SHARE: Final = 0.2
# Fewer points than this after warming up prove nothing.
FEWEST: Final = 8
_MOST: Final = 200
"""Theil-Sen looks at all pairs; 200 points make 19,900 of them."""
_DEVIATIONS: Final = 2.576
"""Of a normal distribution, for a two-sided confidence of 99 %."""
# A curve that lost this share of its range at once has let go of something; then only its valleys count.
_TOOTH: Final = 0.3
_FEWEST_VALLEYS: Final = 4
# Of the first half's slope, what the second half must still have. A cache that fills up slows down.
_STEADY: Final = 0.6
# Of the whole rise, what its single largest jump may make up.
_ONE_JUMP: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """How a curve moves per step, after warming up."""

    per_step: float
    low: float
    high: float
    """Bounds of the slope at a confidence of 99 %; both NaN where there are too few points."""
    total: float
    """How much the curve rose from the end of warming up to its end, along the slope."""
    steps: int
    """Over how many steps."""
    points: int
    steady: bool
    """It grows for sure, grows still, and not by one jump."""


def less(steps: NDArray[Any], values: FloatArray, own_steps: NDArray[Any], own: FloatArray) -> FloatArray:
    """Return a curve less another one, which says at some steps how much of it is somebody's own.

    >>> less(np.array([1, 2, 3]), np.array([5.0, 6.0, 7.0]), np.array([2]), np.array([4.0])).tolist()
    [1.0, 2.0, 3.0]
    """
    if not len(own):
        return values
    at = np.searchsorted(own_steps, steps, side="right") - 1
    rest: FloatArray = values - own[np.maximum(at, 0)]
    return rest


def growth(steps: FloatArray, values: FloatArray) -> Growth:
    """Judge a curve.

    >>> steps = np.arange(50.0)
    >>> growth(steps, 3 * steps).steady, growth(steps, np.minimum(steps, 20)).steady
    (True, False)
    """
    steps, values = _after_warm_up(np.asarray(steps, np.float64), np.asarray(values, np.float64))
    if len(steps) < 2 or steps[-1] <= steps[0]:
        return Growth(per_step=np.nan, low=np.nan, high=np.nan, total=np.nan, steps=0, points=len(steps), steady=False)
    span = float(steps[-1] - steps[0])
    has_teeth, at, of = _valleys(steps, values)
    slope, low, high = _theil_sen(at, of)
    enough = len(at) >= (_FEWEST_VALLEYS if has_teeth else FEWEST)
    steady = enough and low > 0 and _grows_still(at, of, slope) and _largest_jump(of) <= _ONE_JUMP
    return Growth(
        per_step=slope,
        low=low,
        high=high,
        total=slope * span,
        steps=int(span),
        points=len(steps),
        steady=bool(steady),
    )


def _after_warm_up(steps: FloatArray, values: FloatArray) -> tuple[FloatArray, FloatArray]:
    known = np.isfinite(values)
    steps, values = steps[known], values[known]
    if len(steps):
        later = steps >= steps[0] + WARM_UP_SHARE * (steps[-1] - steps[0])
        steps, values = steps[later], values[later]
    if len(steps) > _MOST:
        kept = np.linspace(0, len(steps) - 1, _MOST).round().astype(np.int64)
        steps, values = steps[kept], values[kept]
    return steps, values


def _valleys(steps: FloatArray, values: FloatArray) -> tuple[bool, FloatArray, FloatArray]:
    """Return whether the curve falls back time and again, and then its low points, else the points to judge."""
    spread = float(values.max() - values.min())
    falls = np.flatnonzero(np.diff(values) < -_TOOTH * spread) + 1
    if spread <= 0 or not len(falls):
        return False, steps, values
    last = int(falls[-1])
    if len(falls) < _FEWEST_VALLEYS and values[last:].max() > values[:last].max():
        # Something was let go of once or twice, and by now there is more than ever.
        return False, steps[last:], values[last:]
    return True, steps[falls], values[falls]


def _theil_sen(steps: FloatArray, values: FloatArray) -> tuple[float, float, float]:
    """Return the median slope of all pairs and its confidence bounds (Sen 1968)."""
    count = len(steps)
    i, j = np.triu_indices(count, 1)
    apart = steps[j] > steps[i]
    slopes = np.sort((values[j] - values[i])[apart] / (steps[j] - steps[i])[apart])
    if not len(slopes):
        return float("nan"), float("nan"), float("nan")
    reach = _DEVIATIONS * np.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low, high = int((len(slopes) - reach) // 2), int(np.ceil((len(slopes) + reach) / 2))
    if low < 0 or high >= len(slopes):
        # Too few pairs for this confidence: a curve that rises in every pair still counts as rising.
        return float(np.median(slopes)), float(slopes[0]), float(slopes[-1])
    return float(np.median(slopes)), float(slopes[low]), float(slopes[high])


def _grows_still(steps: FloatArray, values: FloatArray, slope: float) -> bool:
    half = len(steps) // 2
    early, late = _theil_sen(steps[:half], values[:half]), _theil_sen(steps[half:], values[half:])
    return bool(late[0] >= _STEADY * max(early[0], slope) and late[1] > 0)


def _largest_jump(values: FloatArray) -> float:
    rise = float(values[-1] - values[0])
    return float(np.diff(values).max()) / rise if rise > 0 else 1.0
