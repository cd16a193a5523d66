"""What all kernels share: the signature of `measure_change`, and rows in ordinary memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from sonde.core import schema
from sonde.core.schema import Bins, Rows
from sonde.stats.outputs import Outputs
from sonde.stats.protocol import Arena


class Changes(NamedTuple):
    """Tensors to be compared with their shadows, and the rows of the tensors and of the differences."""

    tensors: Sequence[Tensor]
    shadows: Sequence[Tensor]
    rows: Sequence[int]
    change_rows: Sequence[int]

    def each(self) -> Iterator[tuple[Tensor, Tensor, int, int]]:
        """Yield tensor, shadow, row and row of the difference."""
        return zip(self.tensors, self.shadows, self.rows, self.change_rows, strict=True)


class BaseKernel(ABC):
    """Base of the kernels of `sonde.signals.Kernel`."""

    def measure_change(
        self,
        tensors: Sequence[Tensor],
        shadows: Sequence[Tensor],
        rows: Sequence[int],
        change_rows: Sequence[int],
        arena: Arena,
        *,
        histogram: bool = True,
    ) -> None:
        """Merge the summaries of the tensors and of their distance to the shadows, and update the shadows."""
        self._measure_changes(Changes(tensors, shadows, rows, change_rows), arena, histogram)

    def open_outputs(self, outputs: Outputs, arena: Arena, base: int) -> None:
        """Let `outputs` write rows of `arena`, whose first row is that of the site `base`. Most kernels cannot."""
        del outputs, arena, base

    @abstractmethod
    def _measure_changes(self, changes: Changes, arena: Arena, histogram: bool) -> None:
        """Do what `measure_change` promises."""


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
        """Return True: the rows have arrived."""
        return True

    def take(self) -> tuple[Rows, Bins]:
        """Return rows and bins."""
        return self._rows, self._bins
