"""Robust statistics of curves: spread, usual band, slope and growth, insensitive to single outliers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

MAD_TO_STD: Final = 1.4826
"""A median absolute deviation times this estimates the standard deviation of a normal distribution."""
_TAME_EXPONENT: Final = 400
_LARGEST: Final = float(np.finfo(np.float64).max)
# The share of a curve's beginning that is taken for warming up: caches, workspaces, the optimizer's state.
WARM_UP_SHARE: Final = 0.2
# Fewer points than this after warming up prove nothing.
FEWEST: Final = 8
_MOST: Final = 200
"""Theil-Sen looks at all pairs; 200 points make 19,900 of them."""
_DEVIATIONS: Final = 2.576
"""Of a normal distribution, for a two-sided confidence of 99 %."""
# A curve that lost this share of its range at once has released something; then only its valleys count.
_TOOTH: Final = 0.3
_FEWEST_VALLEYS: Final = 4
# Of the first half's slope, what the second half must still have. A cache that fills up slows down.
_STEADY: Final = 0.6
# Of the whole rise, what its single largest jump may make up.
_ONE_JUMP: Final = 0.5
_RELEASED: Final = 2.0
"""Growth over the largest fall of a curve that falls at times."""


# ---------------------------------------------------------------- spread


def median(values: Values) -> float:
    """Return the median of the finite values; NaN if there is none."""
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else float("nan")


def mad(values: Values, about: float | None = None) -> float:
    """Return the median absolute deviation, scaled to a standard deviation; `about` the median unless given.

    >>> mad(np.array([1.0, 2.0, 3.0, 1000.0])) == MAD_TO_STD
    True
    """
    return MAD_TO_STD * median(np.abs(values - (median(values) if about is None else about)))


def tamed(values: Values) -> tuple[Values, int]:
    """Return values near the ends of what floats can hold as a power of two apart, so that sums and squares fit in."""
    exponent = int(np.frexp(np.abs(values[np.isfinite(values)]).max(initial=0.0))[1])
    if abs(exponent) <= _TAME_EXPONENT:
        return values, 0
    return np.ldexp(values, -exponent), exponent


def untamed(values: Values, exponent: int) -> Values:
    """Undo `tamed`."""
    with np.errstate(over="ignore"):
        return np.clip(np.ldexp(values, exponent), -_LARGEST, _LARGEST)


# ---------------------------------------------------------------- slope


class Slope(NamedTuple):
    """A slope with its bounds at a confidence of 99 %; NaN where there are too few points."""

    per_step: float
    low: float
    high: float


def pair_slopes(steps: NDArray[Any], values: Values) -> Values:
    """Return the slopes between all pairs along the last axis; NaN for a pair at the same step."""
    i, j = np.triu_indices(steps.shape[-1], 1)
    run = (steps[..., j] - steps[..., i]).astype(np.float64)
    slopes: Values = np.divide(values[..., j] - values[..., i], run, out=np.full(run.shape, np.nan), where=run > 0)
    return slopes


def theil_sen(steps: NDArray[Any], values: Values) -> Slope:
    """Return the median slope of all pairs and its confidence bounds (Sen 1968)."""
    count = len(steps)
    slopes = np.sort(pair_slopes(steps, values))
    slopes = slopes[np.isfinite(slopes)]
    if not len(slopes):
        return Slope(float("nan"), float("nan"), float("nan"))
    reach = _DEVIATIONS * np.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low, high = int((len(slopes) - reach) // 2), int(np.ceil((len(slopes) + reach) / 2))
    if low < 0 or high >= len(slopes):
        # Too few pairs for this confidence: a curve that rises in every pair still counts as rising.
        low, high = 0, -1
    return Slope(float(np.median(slopes)), float(slopes[low]), float(slopes[high]))


def slope(steps: NDArray[Any], values: Values) -> float:
    """Return the median slope over all pairs of finite readings (Theil-Sen), per step; NaN below two readings."""
    known = np.isfinite(values)
    steps, values = _evenly(steps[known], values[known])
    values, exponent = tamed(values)
    return float(untamed(np.array(theil_sen(steps, values).per_step), exponent))


def _evenly(steps: NDArray[Any], values: Values) -> tuple[NDArray[Any], Values]:
    """Return at most `_MOST` of the points, evenly spaced."""
    if len(steps) <= _MOST:
        return steps, values
    kept = np.linspace(0, len(steps) - 1, _MOST).round().astype(np.int64)
    return steps[kept], values[kept]


def fit_line(values: Values) -> tuple[float, float, float]:
    """Fit a straight line to evenly spaced values by least squares.

    Returns:
        Its slope, the standard deviation around it, and what that is divided by to give the slope's standard error.

    """
    x = np.arange(len(values)) - (len(values) - 1) / 2
    weight = float(x @ x)
    rise = float(x @ values / weight)
    return rise, float(np.std(values - values.mean() - rise * x)), float(np.sqrt(weight))


# ---------------------------------------------------------------- growth


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


def less(steps: NDArray[Any], values: Values, own_steps: NDArray[Any], own: Values) -> Values:
    """Subtract a curve that is known at some steps only; between them its last value counts.

    >>> less(np.array([1, 2, 3]), np.array([5.0, 6.0, 7.0]), np.array([2]), np.array([4.0])).tolist()
    [1.0, 2.0, 3.0]
    """
    if not len(own):
        return values
    at = np.searchsorted(own_steps, steps, side="right") - 1
    rest: Values = values - own[np.maximum(at, 0)]
    return rest


def growth(steps: Values, values: Values) -> Growth:
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
    found = theil_sen(at, of)
    enough = len(at) >= (_FEWEST_VALLEYS if has_teeth else FEWEST)
    steady = enough and found.low > 0 and _grows_still(at, of, found.per_step) and _largest_jump(of) <= _ONE_JUMP
    # What was released before may be released again.
    steady = steady and (has_teeth or found.per_step * span >= _RELEASED * float(-np.diff(values).min(initial=0.0)))
    return Growth(
        per_step=found.per_step,
        low=found.low,
        high=found.high,
        total=found.per_step * span,
        steps=int(span),
        points=len(steps),
        steady=bool(steady),
    )


def _after_warm_up(steps: Values, values: Values) -> tuple[Values, Values]:
    known = np.isfinite(values)
    steps, values = steps[known], values[known]
    if len(steps):
        later = steps >= steps[0] + WARM_UP_SHARE * (steps[-1] - steps[0])
        steps, values = steps[later], values[later]
    return _evenly(steps, values)


def _valleys(steps: Values, values: Values) -> tuple[bool, Values, Values]:
    """Return whether the curve falls back time and again, and then its low points, else the points to judge."""
    spread = float(values.max() - values.min())
    falls = np.flatnonzero(np.diff(values) < -_TOOTH * spread) + 1
    if spread <= 0 or not len(falls):
        return False, steps, values
    last = int(falls[-1])
    if len(falls) < _FEWEST_VALLEYS and values[last:].max() > values[:last].max():
        # Something was released once or twice, and by now there is more than ever.
        return False, steps[last:], values[last:]
    return True, steps[falls], values[falls]


def _grows_still(steps: Values, values: Values, overall: float) -> bool:
    half = len(steps) // 2
    early, late = theil_sen(steps[:half], values[:half]), theil_sen(steps[half:], values[half:])
    return bool(late.per_step >= _STEADY * max(early.per_step, overall) and late.low > 0)


def _largest_jump(values: Values) -> float:
    rise = float(values[-1] - values[0])
    return float(np.diff(values).max()) / rise if rise > 0 else 1.0
