"""Do the ranks of a run hold the same weights? Told from the readings of each, after the fact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from sonde import schema
from sonde.store import Run
from sonde.store.series import ALL_COLUMNS

TOLERANCE: Final = 1e-5
"""Of the weight's own size. Ranks on different processors may round a mean differently, but never by this much."""
MAX_PARAMETERS: Final = 64
"""How many parameters are compared: replicas that drift apart do so everywhere."""


@dataclass(frozen=True, slots=True)
class Drift:
    """A parameter that is not the same on all ranks."""

    name: str
    step: int
    """The first step after which it differed."""
    first: float
    """By how much then, as a part of its size."""
    last: float
    """By how much at the end."""


def compare_ranks(run: Run) -> list[Drift] | None:
    """Return the parameters that differ between ranks, the earliest first; None if there is nothing to compare.

    Shards are no replicas: a parameter whose ranks hold different numbers of elements is left alone.
    """
    if len(run.ranks) < 2:
        return None
    sites = [site for site in run.sites if site.quantity == "parameter" and len(run.ranks_of(site)) > 1]
    found = []
    compared = False
    for site in sites[:: max(1, len(sites) // MAX_PARAMETERS)]:
        parts = [run.stored(site, ALL_COLUMNS, bins=False, rank=rank) for rank in run.ranks_of(site)]
        steps = parts[0].step
        for part in parts[1:]:
            steps = np.intersect1d(steps, part.step)
        rows = [part.rows[np.searchsorted(part.step, steps)] for part in parts]
        if not len(steps) or any((row[:, schema.COUNT] != rows[0][:, schema.COUNT]).any() for row in rows):
            continue
        compared = True
        apart = np.max([_apart(rows[0], row) for row in rows[1:]], axis=0)
        differs = np.flatnonzero(apart > TOLERANCE)
        # At step 0 replicas may differ on purpose: the wrapper copies rank 0's weights when it is made.
        differs = differs[steps[differs] > 0]
        if len(differs):
            at = differs[0]
            found.append(Drift(site.name, int(steps[at]), float(apart[at]), float(apart[-1])))
    return sorted(found, key=lambda drift: drift.step) if compared else None


def _apart(left: schema.Rows, right: schema.Rows) -> schema.Rows:
    """Return how far two rows are apart, as a part of their size."""
    size = np.maximum(np.maximum(np.abs(left[:, schema.MIN]), np.abs(left[:, schema.MAX])), 1e-30)
    columns = [schema.MIN, schema.MAX, schema.MEAN]
    distance: schema.Rows = np.abs(left[:, columns] - right[:, columns]).max(1) / size
    return distance
