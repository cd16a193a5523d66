"""Describe where a curve is going: a running average, its slope, and a few summary numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from sonde.analysis.downsample import Steps, Values
from sonde.core.robust import MAD_TO_STD, mad, slope, tamed, untamed

Direction = Literal["falling", "flat", "rising", "broken"]


def smooth(values: Values, window: float) -> Values:
    """Return the running average of a curve, in which a value counts the less the longer ago it was; gaps stay gaps.

    Only earlier values count, so that nothing rises before its cause and the end is not extrapolated.

    Args:
        values: The curve, in even spacing.
        window: Over about how many values to average; 0 returns the curve as it is.

    >>> smooth(np.array([0.0, 0.0, 1.0, 0.0]), window=2).round(2).tolist()
    [0.0, 0.0, 0.47, 0.28]

    """
    known = np.isfinite(values)
    result = np.where(known, values, np.nan)
    if window <= 0:
        return result
    values, exponent = tamed(values)
    decay = window / (window + 1)
    total = weight = 0.0
    for at in np.flatnonzero(known).tolist():
        total, weight = decay * total + values[at], decay * weight + 1.0
        result[at] = total / weight
    return np.where(known, untamed(result, exponent), np.nan)


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
    # A move that the scatter around it would hide does not count as a direction.
    scatter = mad(values) / MAD_TO_STD
    if not np.isfinite(moved) or abs(moved) <= max(scatter, 0.01 * abs(float(np.median(values)))):
        return "flat"
    return "rising" if moved > 0 else "falling"
