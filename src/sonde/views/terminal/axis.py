"""Round numbers along an axis, linear or logarithmic."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

_LARGEST: Final = sys.float_info.max
_SMALLEST: Final = math.ulp(0.0)
LEAST_POWER, MOST_POWER = -323, 308
"""The least and the greatest power of ten that a float can hold."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of values and the ticks in it. `place` maps a value to a share of the axis."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def around(cls, values: Values, *, log: bool = False) -> Axis:
        """Return the axis that holds all finite values; a logarithmic one only where some are positive."""
        known = values[np.isfinite(values)]
        if log and (known > 0).any():
            known = known[known > 0]
        else:
            log = False
        if not len(known):
            return cls(0.0, 1.0)
        low, high = float(known.min()), float(known.max())
        if low == high:
            # A constant gets room on both sides, so that it runs through the middle.
            room = abs(low) * 0.1 or 1.0
            low, high = (low / 1.25, max(high * 1.25, high + _SMALLEST)) if log else (low - room, high + room)
            low, high = max(low, _SMALLEST if log else -_LARGEST), min(high, _LARGEST)
        return cls(low, high, log)

    def place(self, values: Values) -> Values:
        """Return where values lie, 0 at the low end and 1 at the high end; NaN for what has no place."""
        if not self.log:
            return shares(values, self.low, self.high)
        good = np.isfinite(values) & (values > 0)
        logs = np.log10(values, out=np.full(values.shape, np.nan), where=good)
        span = math.log10(self.high) - math.log10(self.low)
        return (logs - math.log10(self.low)) / span

    def ticks(self, most: int) -> list[float]:
        """Return at most `most` round values on the axis."""
        return log_ticks(self.low, self.high, most) if self.log else linear_ticks(self.low, self.high, most)


def shares(values: Values, low: float, high: float) -> Values:
    """Return where values lie between `low` and `high`, as shares; NaN for what is not finite.

    >>> shares(np.array([-1e308, 0.0, 1e308]), -1e308, 1e308).tolist()
    [0.0, 0.5, 1.0]
    """
    # A difference may be beyond the largest number; that of the halves is not.
    scale = 1.0 if math.isfinite(high - low) else 0.5
    known = np.where(np.isfinite(values), values, np.nan) * scale
    placed: Values = (known - low * scale) / (high * scale - low * scale)
    return placed


def power_of_ten(exponent: float) -> float:
    """Return ten to a power, at most the largest number."""
    return 10.0**exponent if exponent < math.log10(_LARGEST) else _LARGEST


def linear_ticks(low: float, high: float, most: int) -> list[float]:
    """Return round values (1, 2 or 5 times a power of ten apart) from `low` to `high`.

    >>> linear_ticks(0.0, 500.0, 6)
    [0.0, 100.0, 200.0, 300.0, 400.0, 500.0]
    """
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low or most < 1:
        return []
    # Divided one by one: their difference may be beyond the largest number, and a part of it below the smallest.
    exponent = math.floor(math.log10(max(high / most - low / most, _SMALLEST)))
    for factor in (1, 2, 5, 10, 20, 50):
        distance = factor * 10.0 ** max(exponent, LEAST_POWER)
        # A hair of tolerance, so that 0.3 / 0.1 counts as 3.
        first, last = math.ceil(low / distance - 1e-9), math.floor(high / distance + 1e-9)
        if last - first + 1 <= most:
            return [_rounded(i * distance, distance) for i in range(first, last + 1)]
    return []


def _rounded(value: float, distance: float) -> float:
    return round(value, max(0, 2 - math.floor(math.log10(distance)))) + 0.0


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Return powers of ten from `low` to `high`; 1-2-5 steps or linear ones where too few of them fit in.

    >>> log_ticks(2e-4, 3.0, 5)
    [0.001, 0.01, 0.1, 1.0]
    """
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last - first >= 1 and most >= 2:
        stride = math.ceil((last - first + 1) / most)
        return [10.0**power for power in range(first, last + 1) if power % stride == 0 or stride == 1]
    decades = range(max(math.floor(math.log10(low)), LEAST_POWER), min(math.ceil(math.log10(high)), MOST_POWER) + 1)
    fine = [factor * 10.0**power for power in decades for factor in (1, 2, 5)]
    fine = [tick for tick in fine if low <= tick <= high]
    return fine if 2 <= len(fine) <= most else linear_ticks(low, high, most)


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Write ticks with just the digits that tell them apart.

    >>> tick_labels([0.0, 0.5, 1.0]), tick_labels([1e-05, 0.001])
    (['0.0', '0.5', '1.0'], ['1e-5', '1e-3'])
    """
    sizes = [abs(tick) for tick in ticks if tick]
    if sizes and (max(sizes) >= 1e6 or min(sizes) < 1e-3):
        return [_scientific(tick) for tick in ticks]
    for digits in range(7):
        if all(abs(round(tick, digits) - tick) <= 1e-9 * max(abs(tick), 1e-9) for tick in ticks):
            return [f"{tick:,.{digits}f}" for tick in ticks]
    return [f"{tick:g}" for tick in ticks]


def _scientific(value: float) -> str:
    if value == 0:
        return "0"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}e{int(exponent)}"
