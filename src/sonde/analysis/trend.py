"""Where a curve is going: robust smoothing, slope, and the few numbers worth saying about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from sonde.analysis.downsample import Steps, Values
from sonde.core.robust import MAD_TO_STD, mad, pair_slopes, slope, tamed, untamed

Direction = Literal["falling", "flat", "rising", "broken"]

# Beyond six median deviations a reading has no say in the fit (Cleveland 1979).
_OUTLIER_DEVIATIONS: Final = 6.0
_REFITS: Final = 3
_NEIGHBOURS: Final = 7


def smooth(values: Values, window: int) -> Values:
    """Smooth by local straight lines, refitted without outliers (robust LOESS); gaps stay gaps.

    A line reproduces a trend exactly, also at the ends, where a moving average sags towards the middle.

    Args:
        values: The curve, in even spacing.
        window: How many neighbours on each side have a say.

    """
    known = np.isfinite(values)
    if known.sum() < 3 or window < 1:
        return np.where(known, values, np.nan)
    values, exponent = tamed(values)
    filled = np.where(known, values, 0.0)
    offsets = np.arange(-window, window + 1)
    kernel = (1 - np.abs(offsets / (window + 1)) ** 3) ** 3
    trust = np.zeros(len(values))
    trust[known] = _bisquare(_residuals_of_neighbours(np.flatnonzero(known), values[known]))
    fitted = filled
    for _ in range(_REFITS):
        fitted = _local_lines(filled, trust, kernel, offsets)
        trust[known] = _bisquare((filled - fitted)[known])
    return np.where(known, untamed(fitted, exponent), np.nan)


def _local_lines(values: Values, trust: Values, kernel: Values, offsets: NDArray[np.int64]) -> Values:
    # Weighted least squares of a line around every point; each sum over neighbours is one convolution.
    def around(weights: Values, of: Values) -> Values:
        # `correlate` would do, but "same" there follows the longer input, which may be the kernel.
        return np.convolve(of, weights[::-1], "full")[len(offsets) // 2 :][: len(of)]

    s0, s1, s2 = (around(kernel * offsets**power, trust) for power in range(3))
    t0, t1 = (around(kernel * offsets**power, trust * values) for power in range(2))
    spread = s0 * s2 - s1**2
    return np.divide(s2 * t0 - s1 * t1, spread, out=values.copy(), where=spread > 1e-9 * np.maximum(s0, 1e-12) ** 2)


def _residuals_of_neighbours(x: NDArray[np.intp], y: Values) -> Values:
    """Return how far each point is from the median line (Theil-Sen) of its few nearest neighbours.

    Least squares would follow an outlier at the very end, where nothing on the other side holds it back; after that
    no refitting finds it.
    """
    size = min(_NEIGHBOURS, len(x))
    start = np.clip(np.arange(len(x)) - size // 2, 0, len(x) - size)
    index = start[:, None] + np.arange(size)
    xs, ys = x[index].astype(np.float64), y[index]
    slopes = np.median(pair_slopes(xs, ys), axis=1)
    starts = np.median(ys - slopes[:, None] * xs, axis=1)
    residuals: Values = y - (starts + slopes * x)
    return residuals


def _bisquare(residuals: Values) -> Values:
    # Where most points lie on the curve but for rounding, the floor keeps the rounding from being called outliers.
    scale = max(float(np.median(np.abs(residuals))), 1e-9 * float(np.abs(residuals).max()), 1e-300)
    weights: Values = np.clip(1 - (residuals / (_OUTLIER_DEVIATIONS * scale)) ** 2, 0.0, None) ** 2
    return weights


@dataclass(frozen=True, slots=True)
class Trend:
    """What is worth saying about a curve. Lowest and highest are of finite values: NaN and None where there is none."""

    first: float
    last: float
    """The first and the last value as they were recorded, also where they are NaN or infinite."""
    lowest: float
    lowest_step: int | None
    highest: float
    highest_step: int | None
    slope: float
    direction: Direction


def describe(steps: Steps, values: Values) -> Trend:
    """Describe a curve; the direction is that of its last quarter.

    >>> describe(np.arange(5), np.array([5.0, 4.0, 3.0, 2.0, 1.0])).direction
    'falling'
    """
    known = np.isfinite(values)
    if not known.any():
        ends = (float(values[0]), float(values[-1])) if len(values) else (np.nan, np.nan)
        return Trend(*ends, np.nan, None, np.nan, None, np.nan, "broken")
    at, of = steps[known], values[known]
    low, high = int(of.argmin()), int(of.argmax())
    recent = max(len(at) // 4, min(len(at), 5))
    recent_slope = slope(at[-recent:], of[-recent:])
    return Trend(
        first=float(values[0]),
        last=float(values[-1]),
        lowest=float(of[low]),
        lowest_step=int(at[low]),
        highest=float(of[high]),
        highest_step=int(at[high]),
        slope=recent_slope,
        direction=_direction(at[-recent:], of[-recent:], recent_slope, bool(known[-1])),
    )


def _direction(steps: Steps, values: Values, rate: float, ends_finite: bool) -> Direction:
    if not ends_finite:
        return "broken"
    values, exponent = tamed(values)
    moved = float(np.ldexp(rate, -exponent)) * float(steps[-1] - steps[0])
    # A move that the scatter around it would hide is no direction.
    scatter = mad(values) / MAD_TO_STD
    if not np.isfinite(moved) or abs(moved) <= max(scatter, 0.01 * abs(float(np.median(values)))):
        return "flat"
    return "rising" if moved > 0 else "falling"
