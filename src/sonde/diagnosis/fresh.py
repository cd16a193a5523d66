"""Do weights look as if nobody had trained them yet? Told from the shape of their distribution.

Initial weights of torch are uniform within a bound, or normal with a spread that follows from the layer's size. Trained
weights have longer tails and another spread.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from sonde import measures, schema
from sonde.diagnosis.case import Case
from sonde.schema import Rows

MIN_ELEMENTS: Final = 64
_USUAL_SPREADS: Final = (1.0, 0.02, 0.01)


def looks_fresh(row: Rows, shape: tuple[int, ...]) -> bool:
    """Say whether the reading of a weight looks like random numbers drawn for its shape."""
    count = float(schema.finite(row))
    if len(shape) < 2 or count < MIN_ELEMENTS:
        return False
    spread, mean = float(measures.std(row)), float(row[schema.MEAN])
    if not spread > 0 or abs(mean) > 4 * spread / math.sqrt(count):
        return False
    bound = max(-float(row[schema.MIN]), float(row[schema.MAX]))
    # The largest of many uniform numbers lies just below sqrt(3) spreads; of trained weights it lies far beyond.
    if bound <= math.sqrt(3) * spread * (1 + 4 / math.sqrt(count)) and bound >= 1.5 * spread:
        return True
    fan_in, fan_out = math.prod(shape[1:]), shape[0] * math.prod(shape[2:])
    usual = [1 / fan_in, 2 / fan_in, 1 / fan_out, 2 / fan_out, 2 / (fan_in + fan_out)]
    spreads = [*_USUAL_SPREADS, *(math.sqrt(each) for each in usual)]
    # The spread of n normal numbers is known to one part in sqrt(2 n).
    margin = 3 / math.sqrt(2 * count)
    return bool(np.any(np.abs(np.array(spreads) / spread - 1) < margin))


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
