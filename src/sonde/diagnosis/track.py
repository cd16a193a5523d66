"""The readings of one site over the steps that are remembered."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sonde import measures, schema
from sonde.records import Site
from sonde.schema import Rows

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Track:
    """Steps in rising order and a row for each; only steps at which the site was read."""

    site: Site
    steps: NDArray[np.int64]
    rows: Rows

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def name(self) -> str:
        """The name of the module or parameter."""
        return self.site.name

    @property
    def key(self) -> str:
        """The site's key, as people look it up."""
        return self.site.key

    def stat(self, name: str) -> Values:
        """Return a statistic (see `sonde.measures.NAMES`, those that need no histogram) at each step."""
        return measures.compute(name, self.rows)

    def numbers(self) -> Values:
        """Return the plain numbers of a scalar or vital: NaN or infinite where they were."""
        rows = self.rows
        values = rows[:, schema.MEAN].copy()
        values[rows[:, schema.POS_INF] > 0] = np.inf
        values[rows[:, schema.NEG_INF] > 0] = -np.inf
        values[(rows[:, schema.NAN] > 0) | ((rows[:, schema.POS_INF] > 0) & (rows[:, schema.NEG_INF] > 0))] = np.nan
        return values

    def last(self, count: int) -> Track:
        """Return the track of the last `count` steps at which the site was read."""
        return Track(self.site, self.steps[-count:], self.rows[-count:])

    def first(self, count: int) -> Track:
        """Return the track of the first `count` steps at which the site was read."""
        return Track(self.site, self.steps[:count], self.rows[:count])

    def since(self, step: int) -> Track:
        """Return the track from a step on."""
        start = int(np.searchsorted(self.steps, step))
        return Track(self.site, self.steps[start:], self.rows[start:])

    def total(self) -> Rows:
        """Return the one row that all rows merge into."""
        return schema.merge_groups(self.rows, np.zeros(1, np.intp))[0] if len(self) else np.zeros(schema.NUM_COLUMNS)
