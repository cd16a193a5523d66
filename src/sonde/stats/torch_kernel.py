"""Summaries by torch operations alone: for devices without a kernel of their own, and CPUs without the native library.

On a CPU a number can be read without waiting, so `torch_on_cpu` does what is fast there. On other devices no number is
read and nothing waits; that is slow (some 150 operations per tensor), but correct. All is calculated in float64. Where
a device has none, it is float32: counts, bins, least and largest values are exact all the same; mean, mean magnitude
and standard deviation are right to five digits. Where many parts are merged (chunks of four million elements,
micro-batches), the standard deviation of elements that differ by less than 1/100 000 of their mean has fewer, since the
means of the parts are rounded to seven.

While a graph is captured nothing is measured and rows stay as they are: a replay would otherwise write into an arena
that has long been shipped. `skipped` counts those calls.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from sonde.core import schema
from sonde.stats import torch_on_cpu
from sonde.stats.adapt import Readable, difference, to_readable
from sonde.stats.protocol import Arena, BaseKernel, Changes, HostArena, HostShipment, Shipment
from sonde.stats.torch_arena import (
    DEVIATION,
    LARGEST,
    LEAST,
    MAGNITUDE,
    MEAN,
    NUM_COUNTS,
    TorchArena,
    widest_float,
)

_CHUNK: Final = 1 << 22  # elements; bounds the temporaries to some 200 MB
_CPU: Final = torch.device("cpu")


class TorchKernel(BaseKernel):
    """Summarises tensors of one device with torch operations.

    Args:
        device: Where the tensors are.
        reads_numbers: Whether numbers may be read on the way. By default only on the CPU, where that does not wait.
        real: The dtype to calculate in if they may not. By default the widest that the device has.

    """

    name = "torch"

    def __init__(
        self, device: torch.device = _CPU, *, reads_numbers: bool | None = None, real: torch.dtype | None = None
    ) -> None:
        self.device = device
        self.reads_numbers = device.type == "cpu" if reads_numbers is None else reads_numbers
        self.skipped = 0
        self._real = real

    def arena(self, capacity: int) -> HostArena | TorchArena:
        """Make an empty arena with `capacity` rows."""
        if self.reads_numbers:
            return HostArena(capacity)
        if self._real is None:
            self._real = widest_float(self.device)
        return TorchArena(capacity, self.device, self._real)

    def measure(self, tensors: Sequence[Tensor], rows: Sequence[int], arena: Arena, *, histogram: bool = True) -> None:
        """Merge the summary of tensor i into row `rows[i]`."""
        if self._enter(arena):
            for tensor, row in zip(tensors, rows, strict=True):
                self._measure_one(tensor, row, arena, histogram)

    def measure_one(self, tensor: Tensor, row: int, arena: Arena, *, histogram: bool = True) -> bool:
        """Merge the summary of one tensor into a row; return whether the tensor could be read."""
        return self._enter(arena) and self._measure_one(tensor, row, arena, histogram)

    @torch.no_grad()
    def _measure_changes(self, changes: Changes, arena: Arena, histogram: bool) -> None:
        if not self._enter(arena):
            return
        for tensor, shadow, row, change_row in changes.each():
            self._measure_one(tensor, row, arena, histogram)
            change = difference(tensor, shadow)
            if change is not None:
                self._measure_one(change, change_row, arena, histogram)
                shadow.detach().copy_(tensor.detach())

    def warm_up(self, dtypes: Collection[torch.dtype] = ()) -> None:
        """Do nothing: there is nothing to prepare."""

    def ship(self, arena: Arena) -> Shipment:
        """Start moving the arena's rows to the host."""
        assert isinstance(arena, HostArena | TorchArena)
        return HostShipment(arena) if isinstance(arena, HostArena) else arena.ship()

    def _enter(self, arena: Arena) -> bool:
        """Order the current stream after the arena's work so far; False where nothing may be queued."""
        if isinstance(arena, HostArena):
            return True
        assert isinstance(arena, TorchArena)
        if arena.is_captured():
            self.skipped += 1
            return False
        arena.enter()
        return True

    def _measure_one(self, tensor: Tensor, row: int, arena: Arena, histogram: bool) -> bool:
        readable = to_readable(tensor)
        # A tensor elsewhere would have to be fetched, and that waits.
        if isinstance(arena, HostArena):
            if readable is None or readable.values.device.type != "cpu":
                return False
            torch_on_cpu.add(readable, row, arena, histogram)
        else:
            assert isinstance(arena, TorchArena)
            if readable is None or readable.values.device != arena.counts.device:
                return False
            _add(readable, row, arena, histogram)
        return True


@torch.no_grad()
def _add(readable: Readable, row: int, arena: TorchArena, histogram: bool) -> None:
    """Merge the summary of a tensor into a row on its device."""
    merged = _Part(arena.counts[row], arena.averages[row])
    if readable.implicit_zeros:
        merged = _merge(merged, _zeros(readable.implicit_zeros, arena))
    values = readable.values
    flat = values.as_strided((values.numel(),), (1,))  # in the order of memory
    for start in range(0, values.numel(), _CHUNK):
        chunk = flat[start : start + _CHUNK].to(arena.averages.dtype)
        merged = _merge(merged, _summarise(chunk))
        if histogram:
            arena.bins[row] += _count_bins(chunk)
    arena.counts[row], arena.averages[row] = merged
    arena.counts[row, schema.SEEN] += 1


class _Part(NamedTuple):
    """A row as it lies in an arena."""

    counts: Tensor
    averages: Tensor

    @property
    def finite(self) -> Tensor:
        """How many finite elements it summarises."""
        counts = self.counts
        return counts[schema.COUNT] - counts[schema.NAN] - counts[schema.POS_INF] - counts[schema.NEG_INF]


def _zeros(number: int, arena: TorchArena) -> _Part:
    """Return the row of zeros that a sparse tensor has without storing them."""
    counts = torch.zeros_like(arena.counts[0])
    counts[schema.COUNT] = counts[schema.ZERO] = number
    return _Part(counts, torch.zeros_like(arena.averages[0]))


def _summarise(values: Tensor) -> _Part:
    """Return the row of elements; that they are of a tensor is counted elsewhere."""
    usable = values.isfinite()
    finite = usable.sum()
    kept = values.where(usable, 0)
    magnitude = kept.abs()
    # By a power of two, which rounds nothing: so neither sums nor squares leave the range of the dtype.
    scale = _power_of_two(magnitude.max())
    unit = kept / scale
    number = finite.clamp(min=1).to(values.dtype)
    mean = unit.sum() / number
    deviation = (unit - mean).where(usable, 0)
    rest = deviation.sum() / number  # what rounding has left out of the mean
    deviation = (deviation - rest).where(usable, 0)
    counts = {
        schema.SEEN: torch.zeros_like(finite),
        schema.COUNT: torch.full_like(finite, values.numel()),
        schema.NAN: values.isnan().sum(),
        schema.POS_INF: (values == math.inf).sum(),
        schema.NEG_INF: (values == -math.inf).sum(),
        schema.ZERO: (values == 0).sum(),
        schema.GE_ONE: (magnitude >= 1).sum(),
    }
    averages = {
        LEAST: values.where(usable, math.inf).min().where(finite > 0, 0),
        LARGEST: values.where(usable, -math.inf).max().where(finite > 0, 0),
        MEAN: (mean + rest) * scale,
        DEVIATION: (deviation.square().sum() / number).sqrt() * scale,
        MAGNITUDE: (magnitude / scale).sum() / number * scale,
    }
    return _Part(
        torch.stack([counts[column] for column in range(NUM_COUNTS)]),
        torch.stack([averages[column] for column in range(len(averages))]),
    )


def _merge(left: _Part, right: _Part) -> _Part:
    """Do what `schema.merge_rows` does, on the device. An empty row is all zero, and its share too."""
    n_left, n_right = left.finite, right.finite
    number = (n_left + n_right).clamp(min=1).to(left.averages.dtype)
    share_left, share_right = n_left / number, n_right / number
    delta = (right.averages[MEAN] - left.averages[MEAN]).where((n_left > 0) & (n_right > 0), 0)
    merged = left.averages * share_left + right.averages * share_right
    merged[MEAN] = left.averages[MEAN].where(n_left > 0, right.averages[MEAN]) + delta * share_right
    merged[DEVIATION] = _root_of_squares(
        torch.stack(
            [
                left.averages[DEVIATION] * share_left.sqrt(),
                right.averages[DEVIATION] * share_right.sqrt(),
                delta * (share_left * share_right).sqrt(),
            ]
        )
    )
    for column, choose in ((LEAST, torch.minimum), (LARGEST, torch.maximum)):
        ours, theirs = left.averages[column], right.averages[column]
        merged[column] = choose(ours.where(n_left > 0, theirs), theirs.where(n_right > 0, ours))
    return _Part(left.counts + right.counts, merged)


def _root_of_squares(values: Tensor) -> Tensor:
    scale = _power_of_two(values.abs().max())
    return (values / scale).square().sum().sqrt() * scale


def _power_of_two(magnitude: Tensor) -> Tensor:
    """Return the power of two at or below a magnitude, within the range of normal numbers: its exponent bits."""
    if magnitude.dtype == torch.float64:
        power = (magnitude.view(torch.int64) & (0x7FF << 52)).view(torch.float64)
    else:
        power = (magnitude.view(torch.int32) & (0xFF << 23)).view(torch.float32)
    return power.clamp(min=torch.finfo(magnitude.dtype).tiny)


def _count_bins(values: Tensor) -> Tensor:
    if values.dtype == torch.float64:
        exponents, bias = (values.view(torch.int64) >> 52) & 0x7FF, 1023
    else:
        exponents, bias = (values.view(torch.int32) >> 23) & 0xFF, 127
    codes = (exponents - (bias + schema.FIRST_EXPONENT - 1)).clamp_(1, schema.NUM_BINS)
    codes *= (values != 0) & values.isfinite()  # code 0 is in no bin
    # Not bincount: it waits for the device to learn how many bins it needs.
    counts = torch.zeros(schema.NUM_BINS + 1, dtype=torch.int64, device=values.device)
    return counts.index_add_(0, codes.long(), torch.ones_like(counts[:1]).expand(len(codes)))[1:]
