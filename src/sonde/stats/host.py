"""Rows in ordinary memory: the arena and the shipment of every kernel that works on CPU tensors."""

from __future__ import annotations

import numpy as np

from sonde import schema
from sonde.schema import Bins, Rows


class HostArena:
    """Room for one step's rows as numpy arrays."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.rows: Rows = np.zeros((capacity, schema.NUM_COLUMNS))
        self.bins: Bins = np.zeros((capacity, schema.NUM_BINS), dtype=np.uint64)
        self.nbytes = self.rows.nbytes + self.bins.nbytes

    def reset(self) -> None:
        """Empty all rows."""
        self.rows.fill(0.0)
        self.bins.fill(0)

    def add_zeros(self, row: int, count: int) -> None:
        """Merge `count` zeros, which no tensor stores, into a row."""
        self.rows[row] = schema.merge_rows(self.rows[row], schema.row_of_zeros(count))


class HostShipment:
    """Rows that are on the host already. A copy, so that the arena can be reset as soon as it is shipped."""

    def __init__(self, arena: HostArena) -> None:
        self._rows = arena.rows.copy()
        self._bins = arena.bins.copy()

    def ready(self) -> bool:
        """Say that the rows have arrived."""
        return True

    def take(self) -> tuple[Rows, Bins]:
        """Return rows and bins."""
        return self._rows, self._bins
