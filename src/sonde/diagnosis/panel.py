"""The readings of many sites over the same steps, side by side: what layers are compared by."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sonde import measures, schema
from sonde.diagnosis.track import Values
from sonde.records import Site
from sonde.schema import Rows


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
            values = self._stats[name] = measures.compute(name, self.rows)
            values.flags.writeable = False
        return values

    def column(self, index: int) -> Values:
        """Return a column of the rows by step and site."""
        values: Values = self.rows[..., index]
        return values

    def pick(self, chosen: list[int]) -> Panel:
        """Return the panel of some of the sites, in the given order."""
        return Panel(tuple(self.sites[index] for index in chosen), self.steps, self.rows[:, chosen])
