"""The interfaces of kernels, arenas and recorders, between tensors and numbers. Needs torch.

A *kernel* serves one device. It owns no data: it summarises tensors into the rows of an *arena* and merges into what
a row already holds. When a step ends its arena is *shipped*: copied towards the host without waiting, and read by the
worker thread once the copy has arrived.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from sonde.core import schema
from sonde.core.schema import Bins, Rows
from sonde.parallel.placements import WHOLE, Holding
from sonde.records import Phase, Quantity
from sonde.stats.outputs import Outputs

LateNumbers = Callable[[], Sequence[tuple[int, float]]]
"""Returns numbers by site that can be had once the rows of their step have arrived; called by the worker thread."""


def queue_of(device: torch.device) -> Hashable:
    """Return where work for a device is queued now: the device, on CUDA with the current stream."""
    return device if device.type != "cuda" else (device, current_stream_handle(device.index))


def _current_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


# The driver's handle of a device's current stream; without making a stream object where torch allows.
current_stream_handle: Final[Callable[[int], int]] = getattr(torch._C, "_cuda_getCurrentRawStream", _current_stream)


class Shipment(Protocol):
    """Rows on their way to the host."""

    def ready(self) -> bool:
        """Return whether the rows have arrived; never waits."""

    def take(self) -> tuple[Rows, Bins]:
        """Return rows [capacity, columns] and bins [capacity, NUM_BINS]. Waits for them: for the worker thread only."""


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

    def measure_one(self, tensor: Tensor, row: int, arena: Arena, *, histogram: bool = True) -> bool:
        """Merge the summary of one tensor into a row, as a hook wants it; return whether the tensor could be read."""

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

    def warm_up(self, dtypes: Collection[torch.dtype] = ()) -> None:
        """Do now what the first use would have to wait for, such as compiling.

        `dtypes` are element types to expect besides float32 and bfloat16.
        """

    def open_outputs(self, outputs: Outputs, arena: Arena, base: int) -> None:
        """Let `outputs` write rows of `arena`, whose first row is the site `base`'s, if the kernel can do that."""

    def ship(self, arena: Arena) -> Shipment:
        """Start moving the arena's rows to the host."""


class Recorder(Protocol):
    """What taps report to: it names sites and takes what is seen at them during a step."""

    def site(
        self,
        name: str,
        quantity: Quantity,
        *,
        phase: Phase = "train",
        call: int = 0,
        part: str = "",
        kind: str = "",
        tensor: Tensor | None = None,
        aliases: tuple[str, ...] = (),
        same_as: int | None = None,
        held: Holding = WHOLE,
    ) -> int:
        """Return the id of a site, making it known at its first use."""

    def see(self, site: int, tensor: Tensor) -> None:
        """Summarise one tensor now."""

    def has_histogram(self, site: int) -> bool:
        """Return whether the histogram of what is seen at a site is recorded."""

    def open_outputs(self, outputs: Outputs, device: torch.device) -> None:
        """Let `outputs` write the rows of this step for a device, until they are shipped."""

    def see_many(self, tensors: Sequence[Tensor], sites: Sequence[int]) -> None:
        """Summarise many tensors of one device in one pass."""

    def see_changes(
        self, tensors: Sequence[Tensor], shadows: Sequence[Tensor], sites: Sequence[int], changes: Sequence[int]
    ) -> None:
        """Summarise many tensors of one device and how they differ from their shadows; refresh the shadows."""

    def put(self, site: int, value: float) -> None:
        """Take one plain number."""

    def put_late(self, numbers: LateNumbers) -> None:
        """Take plain numbers that can be had only when this step's rows have arrived."""

    def unscale(self, sites: Sequence[int], scale: int) -> None:
        """Divide what was seen at `sites` in this step by the number seen at the site `scale`, once it has arrived."""

    def mark_skipped_if(self, flag: int) -> None:
        """Mark this step as skipped if the number seen at the site `flag` turns out to be non-zero."""


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
    """Base of the kernels."""

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
