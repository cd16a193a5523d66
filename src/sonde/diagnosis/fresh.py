"""Test whether weights still have their random initial values, from the shape of their distribution.

Initial weights of torch are uniform within a bound, or normal with a spread that follows from the layer's size. Trained
weights have longer tails and another spread.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from sonde.core import schema, statistics
from sonde.core.schema import Rows
from sonde.diagnosis.case import Case

MIN_ELEMENTS: Final = 64
MIN_NORMAL: Final = 1024
_USUAL_SPREADS: Final = (1.0, 0.02, 0.01)


def looks_fresh(row: Rows, shape: tuple[int, ...]) -> bool:
    """Return whether the reading of a weight looks like random numbers drawn for its shape."""
    count = float(schema.finite(row))
    if len(shape) < 2 or count < MIN_ELEMENTS:
        return False
    spread, mean = float(statistics.std(row)), float(row[schema.MEAN])
    if not spread > 0 or abs(mean) > 4 * spread / math.sqrt(count):
        return False
    largest = max(-float(row[schema.MIN]), float(row[schema.MAX]))
    fan_in, fan_out = math.prod(shape[1:]), shape[0] * math.prod(shape[2:])
    return _is_uniform(count, spread, largest, fan_in, fan_out) or _is_normal(count, spread, largest, fan_in, fan_out)


def _is_uniform(count: float, spread: float, largest: float, fan_in: int, fan_out: int) -> bool:
    """Return whether the numbers fill a usual range to its ends, evenly."""
    bounds = np.sqrt([1 / fan_in, 3 / fan_in, 6 / fan_in, 6 / (fan_in + fan_out)])
    # The largest of n numbers lies within a few parts in n of the end; the spread is known to half a part in sqrt(n).
    fills = (largest <= bounds * (1 + 1e-6)) & (largest >= bounds * (1 - 12 / count))
    even = np.abs(spread * math.sqrt(3) / bounds - 1) < 1.5 / math.sqrt(count)
    return bool(np.any(fills & even))


def _is_normal(count: float, spread: float, largest: float, fan_in: int, fan_out: int) -> bool:
    """Return whether many numbers have a usual spread and no longer tails than normal ones."""
    variances = [1 / fan_in, 2 / fan_in, 2 / (fan_in + fan_out)]
    spreads = np.array([*_USUAL_SPREADS, *np.sqrt(variances)])
    short = largest < spread * (math.sqrt(2 * math.log(count)) + 1.5)
    return count >= MIN_NORMAL and short and bool(np.any(np.abs(spreads / spread - 1) < 2.5 / math.sqrt(2 * count)))


def fresh_parameters(case: Case, names: tuple[str, ...]) -> list[str]:
    """Return those weights that looked fresh when the run began, of those whose first reading is still known."""
    panel = case.first_panel("parameter")
    places = {site.name: at for at, site in enumerate(panel.sites)}
    found = []
    for name in names:
        at = places.get(name)
        if at is None:
            continue
        read = np.flatnonzero(panel.read[:, at])
        if len(read) and looks_fresh(panel.rows[read[0], at], panel.sites[at].shape):
            found.append(name)
    return found
