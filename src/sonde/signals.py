"""The recording side's seam between tensors and numbers: what a statistics kernel must offer. Needs torch.

A *kernel* serves one device. It owns no data: it summarises tensors into the rows of an *arena*, where row i is the site
with id i, and merges into what the row already holds. When a step ends its arena is *shipped*: copied towards the host
without waiting, and read by the worker thread once the copy has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from sonde.schema import Bins, Rows


class Shipment(Protocol):
    """Rows on their way to the host."""

    def ready(self) -> bool:
        """Say whether the rows have arrived; never waits."""

    def take(self) -> tuple[Rows, Bins]:
        """Return rows [sites, columns] and bins [sites, NUM_BINS], waiting if they have not arrived (worker thread only)."""


class Arena(Protocol):
    """Room for one step's rows on one device; all zero when fresh."""

    capacity: int
    nbytes: int

    def reset(self) -> None:
        """Empty all rows, so that the arena can serve another step."""


class Kernel(Protocol):
    """One-pass summaries of many tensors on one device family. Never waits for the device, never alters a tensor."""

    name: str

    def arena(self, capacity: int) -> Arena:
        """Make an empty arena with `capacity` rows."""

    def measure(self, tensors: Sequence[Tensor], rows: Sequence[int], arena: Arena, *, histogram: bool = True) -> None:
        """Merge the summary of tensor i into row `rows[i]`."""

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
        """Merge the summary of tensor i into `rows[i]`, of tensor i minus shadow i into `change_rows[i]`.

        Afterwards shadow i equals tensor i. Each element is read once.
        """

    def ship(self, arena: Arena) -> Shipment:
        """Start moving the arena's rows to the host."""
