"""Readings as rules see them: a `Track` of one site over its steps, a `Panel` of many sites over the same steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sonde.core import schema, statistics
from sonde.core.schema import Rows
from sonde.records import Site

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
        """Return a statistic (see `sonde.core.statistics`, those that need no histogram) at each step."""
        return statistics.compute(name, self.rows)

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


@dataclass(frozen=True, slots=True, eq=False)
class Panel:
    """Rows by step, site and column. A site that was not read in a step has an empty row: most statistics are NaN."""

    sites: tuple[Site, ...]
    steps: NDArray[np.int64]
    rows: Rows
    _stats: dict[str, Values] = field(default_factory=dict)
    """Measures that a rule has asked for: most are of interest to several."""

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def names(self) -> list[str]:
        """The names of the modules or parameters, one per site."""
        return [site.name for site in self.sites]

    @property
    def read(self) -> NDArray[np.bool_]:
        """Whether each site was read in each step."""
        result: NDArray[np.bool_] = self.rows[..., schema.SEEN] > 0
        return result

    def stat(self, name: str) -> Values:
        """Return a statistic (those that need no histogram) by step and site. It must not be written to."""
        values = self._stats.get(name)
        if values is None:
            values = self._stats[name] = statistics.compute(name, self.rows)
            values.flags.writeable = False
        return values

    def column(self, index: int) -> Values:
        """Return a column of the rows by step and site."""
        values: Values = self.rows[..., index]
        return values

    def pick(self, chosen: list[int]) -> Panel:
        """Return the panel of some of the sites, in the given order."""
        return Panel(tuple(self.sites[index] for index in chosen), self.steps, self.rows[:, chosen])
