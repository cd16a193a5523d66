"""Summaries by torch operations alone, on whatever device a tensor is: no scalar is read and nothing waits.

Slow (some fifty operations per tensor), but right: for devices that have no kernel of their own.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

import numpy as np
import torch
from torch import Tensor

from sonde import schema
from sonde.schema import Bins, Rows
from sonde.signals import Arena
from sonde.stats.adapt import Readable, to_readable
from sonde.stats.one_by_one import OneByOne

_CHUNK: Final = 1 << 22  # elements; bounds the temporaries to some 200 MB
_PINNED_DEVICES: Final = ("cuda", "xpu")
_ADDED_UP: Final = (schema.SEEN, schema.COUNT, schema.NAN, schema.POS_INF, schema.NEG_INF, schema.ZERO, schema.GE_ONE)


class DeviceArena:
    """Room for one step's rows on a device."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        real = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        self.capacity = capacity
        self.device = device
        self.rows = torch.zeros(capacity, schema.NUM_COLUMNS, dtype=real, device=device)
        self.bins = torch.zeros(capacity, schema.NUM_BINS, dtype=torch.int64, device=device)
        self.nbytes = self.rows.nbytes + self.bins.nbytes

    def reset(self) -> None:
        """Empty all rows."""
        self.rows.zero_()
        self.bins.zero_()


class DeviceShipment:
    """Rows on their way from a device."""

    def __init__(self, arena: DeviceArena) -> None:
        self._rows, self._bins = _copied(arena.rows), _copied(arena.bins)
        self._arrival = None
        if arena.device.type != "cpu":
            self._arrival = torch.Event(arena.device)
            self._arrival.record()

    def ready(self) -> bool:
        """Say whether the rows have arrived."""
        return self._arrival is None or self._arrival.query()

    def take(self) -> tuple[Rows, Bins]:
        """Return rows and bins, waiting if they have not arrived."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._rows.numpy().astype(np.float64), self._bins.numpy().astype(np.uint64)


class GenericKernel(OneByOne):
    """Summarises tensors of one device with torch operations that do not wait for it."""

    name = "generic"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def arena(self, capacity: int) -> DeviceArena:
        """Make an empty arena with `capacity` rows."""
        return DeviceArena(capacity, self.device)

    @torch.no_grad()
    def measure_one(self, tensor: Tensor, row: int, arena: Arena, *, histogram: bool = True) -> bool:
        """Merge the summary of one tensor into a row; say whether the tensor could be read."""
        assert isinstance(arena, DeviceArena)
        readable = to_readable(tensor)
        # A tensor elsewhere would have to be fetched, and that waits.
        if readable is None or readable.values.device.type != self.device.type:
            return False
        merged = _merge(arena.rows[row], _row_of_zeros(readable, arena))
        values = readable.values
        flat = values.as_strided((values.numel(),), (1,))  # in the order of memory
        for start in range(0, values.numel(), _CHUNK):
            chunk = flat[start : start + _CHUNK].to(arena.rows.dtype)
            merged = _merge(merged, _summarise(chunk))
            if histogram:
                arena.bins[row] += _count_bins(chunk)
        arena.rows[row] = merged
        return True

    def warm_up(self, dtypes: Collection[torch.dtype] = ()) -> None:
        """Do nothing: there is nothing to prepare."""

    def ship(self, arena: Arena) -> DeviceShipment:
        """Start moving the arena's rows to the host."""
        assert isinstance(arena, DeviceArena)
        return DeviceShipment(arena)


def _copied(values: Tensor) -> Tensor:
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.device.type in _PINNED_DEVICES)
    return host.copy_(values, non_blocking=True)


def _row_of_zeros(readable: Readable, arena: DeviceArena) -> Tensor:
    """Return the row of a tensor of which only the zeros that it does not store are known yet."""
    row = torch.zeros_like(arena.rows[0])
    row[schema.SEEN] = 1
    row[schema.COUNT] = row[schema.ZERO] = readable.implicit_zeros
    return row


def _summarise(values: Tensor) -> Tensor:
    """Return the row of elements, less that they make one tensor."""
    usable = values.isfinite()
    number = usable.sum()
    kept = values.where(usable, 0)
    magnitude = kept.abs()
    mean = kept.sum() / number.clamp(min=1)
    columns = {
        "seen": torch.zeros_like(mean),
        "count": torch.full_like(mean, values.numel()),
        "nan": values.isnan().sum(),
        "pos_inf": (values == math.inf).sum(),
        "neg_inf": (values == -math.inf).sum(),
        "zero": (values == 0).sum(),
        "ge_one": (magnitude >= 1).sum(),
        "min": values.where(usable, math.inf).min().where(number > 0, 0),
        "max": values.where(usable, -math.inf).max().where(number > 0, 0),
        "mean": mean,
        "m2": (kept - mean).where(usable, 0).square().sum(),
        "abs_sum": magnitude.sum(),
    }
    return torch.stack([columns[name].to(values.dtype) for name in schema.COLUMNS])


def _finite(row: Tensor) -> Tensor:
    return row[schema.COUNT] - row[schema.NAN] - row[schema.POS_INF] - row[schema.NEG_INF]


def _merge(left: Tensor, right: Tensor) -> Tensor:
    """Do what `schema.merge_rows` does, on the device."""
    n_left, n_right = _finite(left), _finite(right)
    weight = n_right / (n_left + n_right).clamp(min=1)
    delta = (right[schema.MEAN] - left[schema.MEAN]).where(n_left * n_right > 0, 0)
    merged = left + right
    merged[schema.MEAN] = left[schema.MEAN].where(n_left > 0, right[schema.MEAN]) + delta * weight
    merged[schema.M2] += delta.square() * n_left * weight
    for column, choose in ((schema.MIN, torch.minimum), (schema.MAX, torch.maximum)):
        both = choose(left[column], right[column])
        only = left[column].where(n_left > 0, right[column])
        merged[column] = both.where(n_left * n_right > 0, only)
    return merged


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
