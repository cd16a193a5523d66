"""Statistics of tensors on request: measured at once where they are, read when asked, in one transfer per device.

Asking waits for the device, since the caller wants the numbers now. What a session records never waits; see
`sonde.record`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from sonde.core import schema, statistics
from sonde.core.schema import Bins, Rows
from sonde.hooks.names import named_parameters
from sonde.records import Reading
from sonde.stats import kernel_for
from sonde.stats.protocol import Arena, Kernel

_ROWS_PER_ARENA: Final = 256
OWN_RANGE: Final = "sonde: reading"
"""The range around Sonde's own operators in a profile."""

_kept_kernel = functools.cache(kernel_for)


@dataclass(slots=True, eq=False)
class _DeviceArenas:
    """The arenas of one device, filled one after another."""

    kernel: Kernel
    arenas: list[Arena] = field(default_factory=list)
    used: int = 0
    """Rows taken in the last arena."""

    def reserve(self, rows: int) -> int:
        """Return the first of `rows` free rows of the last arena, which is a new one if they would not fit."""
        if not self.arenas or self.used + rows > self.arenas[-1].capacity:
            with torch.inference_mode(False):
                self.arenas.append(self.kernel.arena(max(rows, _ROWS_PER_ARENA)))
            self.used = 0
        first = self.used
        self.used += rows
        return first


class Tally:
    """Measures tensors as they come and hands out their readings later."""

    def __init__(self, *, histogram: bool = True) -> None:
        self._histogram = histogram
        self._by_device: dict[torch.device, _DeviceArenas] = {}
        self._places: list[tuple[torch.device, int, int]] = []

    def __len__(self) -> int:
        return len(self._places)

    def add(self, tensor: Tensor) -> int:
        """Measure a tensor now; return the index of its reading."""
        return self.add_all([tensor])[0]

    def add_all(self, tensors: list[Tensor]) -> list[int]:
        """Measure tensors now, in one pass for each device; return the indices of their readings."""
        with _own_range():
            return self._add_all(tensors)

    def _add_all(self, tensors: list[Tensor]) -> list[int]:
        first = len(self._places)
        self._places += [(tensor.device, -1, -1) for tensor in tensors]
        by_device: dict[torch.device, list[int]] = {}
        for offset, tensor in enumerate(tensors):
            if tensor.device.type != "meta":
                by_device.setdefault(tensor.device, []).append(offset)
        for device, offsets in by_device.items():
            arenas = self._arenas(device)
            row = arenas.reserve(len(offsets))
            rows = list(range(row, row + len(offsets)))
            arenas.kernel.measure(
                [tensors[offset].detach() for offset in offsets], rows, arenas.arenas[-1], histogram=self._histogram
            )
            for offset, row in zip(offsets, rows, strict=True):
                self._places[first + offset] = (device, len(arenas.arenas) - 1, row)
        return list(range(first, len(self._places)))

    def readings(self) -> list[Reading | None]:
        """Return all readings in order, waiting for the devices; None for a tensor that has no memory to read."""
        with _own_range():
            arrived = {device: self._fetch(arenas) for device, arenas in self._by_device.items()}
        found: list[Reading | None] = []
        for device, arena, row in self._places:
            rows, bins = arrived[device][arena] if arena >= 0 else (None, None)
            if rows is None or bins is None or not rows[row, schema.SEEN]:
                found.append(None)
            else:
                found.append(Reading(rows[row], bins[row] if self._histogram else None))
        return found

    def _fetch(self, arenas: _DeviceArenas) -> list[tuple[Rows, Bins]]:
        # All are on their way before the first is waited for.
        shipments = [arenas.kernel.ship(arena) for arena in arenas.arenas]
        return [shipment.take() for shipment in shipments]

    def _arenas(self, device: torch.device) -> _DeviceArenas:
        arenas = self._by_device.get(device)
        if arenas is None:
            # The choice for the CPU costs nothing and may change with the environment; others compile.
            kernel = kernel_for(device) if device.type == "cpu" else _kept_kernel(device)
            arenas = self._by_device[device] = _DeviceArenas(kernel)
        return arenas


def _own_range() -> contextlib.AbstractContextManager[Any]:
    """Mark operators as Sonde's while a profiler runs, so that it does not report them as the program's."""
    if torch._C._autograd._profiler_enabled():
        return torch.profiler.record_function(OWN_RANGE)
    return contextlib.nullcontext()


def readings_of(tensors: Mapping[str, Tensor], *, histogram: bool = True) -> dict[str, Reading]:
    """Return the reading of every tensor by name: one pass over each, one transfer per device.

    A tensor without memory (on the meta device, not initialised yet) is left out.

    >>> readings_of({"a": torch.tensor([1.0, 3.0])})["a"].mean
    2.0
    """
    tally = Tally(histogram=histogram)
    tally.add_all(list(tensors.values()))
    return {name: reading for name, reading in zip(tensors, tally.readings(), strict=True) if reading is not None}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients that are there, by the name of their parameter."""
    found = named_parameters({"": model})
    return {name: parameter.grad for name, parameter, _ in found if parameter.grad is not None}


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by name; a tied one has the first of its names."""
    return {name: parameter for name, parameter, _ in named_parameters({"": model}) if not _is_lazy(parameter)}


def read_gradients(model: nn.Module) -> dict[str, Reading]:
    """Return the readings of all gradients by name."""
    return readings_of(gradients(model))


def read_parameters(model: nn.Module) -> dict[str, Reading]:
    """Return the readings of all parameters by name."""
    return readings_of(parameters(model))


def total_norm(readings: Iterable[Reading]) -> float:
    """Return the Euclidean norm of all elements together; NaN or infinite if any of them is.

    >>> total_norm([Reading.of([3.0]), Reading.of([4.0])])
    5.0
    """
    rows = np.array([reading.row for reading in readings])
    if not len(rows):
        return 0.0
    if rows[:, schema.NAN].any():
        return math.nan
    if statistics.nonfinite(rows).any():
        return math.inf
    return math.hypot(*statistics.norm(rows)[rows[:, schema.COUNT] > 0].tolist())


def _is_lazy(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, nn.parameter.UninitializedParameter)
