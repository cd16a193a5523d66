"""Rows on any device of torch, copied to the host without waiting.

Counts lie apart from the other numbers, as whole numbers: so they are exact on devices that have no float64 too. What
else a row of `schema` holds is kept as averages, which fit into float32 as long as the elements do; sums of many
elements, and squares, would not. The host makes sums of them, in float64.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

from sonde.core import schema
from sonde.core.schema import Bins, Rows
from sonde.hooks.guard import is_capturing
from sonde.stats.cuda.driver import beside_captures, keep_if_failed, noting_failure

NUM_COUNTS: Final = schema.GE_ONE + 1
"""Columns that are counts: the first ones of a row, in its order."""
AVERAGES: Final = (schema.MIN, schema.MAX, schema.MEAN, schema.M2, schema.ABS_SUM)
"""The other columns, in their order. M2 is kept as the standard deviation, the sum of magnitudes as their mean."""
LEAST, LARGEST, MEAN, DEVIATION, MAGNITUDE = range(len(AVERAGES))
# Devices whose streams run side by side, can be captured into graphs, and copy to pinned memory without waiting.
_WITH_STREAMS: Final = ("cuda", "xpu")


class TorchArena:
    """Room for one step's rows on a device.

    An arena may be used from several streams in turn. Its users call `enter` first, which makes the current
    stream wait (on the device) for what was queued for this arena on the stream before.

    `reset` is called by the worker thread and only sets a flag: the next `enter` empties the rows, on its stream. So
    the worker never queues work, which could end up in a graph that another thread is capturing.
    """

    def __init__(self, capacity: int, device: torch.device, real: torch.dtype) -> None:
        self.capacity = capacity
        self.device = device
        self.counts = torch.zeros(capacity, NUM_COUNTS, dtype=torch.int64, device=device)
        self.averages = torch.zeros(capacity, len(AVERAGES), dtype=real, device=device)
        self.bins = torch.zeros(capacity, schema.NUM_BINS, dtype=torch.int64, device=device)
        self._parts = (self.counts, self.averages, self.bins)
        self.nbytes = sum(part.nbytes for part in self._parts)
        # Pinned once: to find pinned memory anew, torch asks about events, which ends a capture in another thread.
        self._has_streams = device.type in _WITH_STREAMS
        self.host = [torch.empty(part.shape, dtype=part.dtype, pin_memory=self._has_streams) for part in self._parts]
        self._stream = _current_stream(device)
        self._is_stale = False

    @property
    def rows(self) -> Tensor:
        """The rows on the device, as far as counts go: for questions about them that do not wait."""
        self.enter()
        return self.counts

    def enter(self) -> None:
        """Order the current stream after all that was queued for this arena so far."""
        stream = _current_stream(self.device) if self._has_streams else None
        if stream is not None and self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
            self._stream = stream
        if self._is_stale:
            self._is_stale = False
            with torch.no_grad():
                for part in self._parts:
                    part.zero_()

    def is_captured(self) -> bool:
        """Return whether what is queued now would become part of a graph."""
        if is_capturing():  # on the device that is current, which may be another one
            return True
        asked = getattr(_current_stream(self.device), "is_capturing", None) if self._has_streams else None
        return asked is not None and bool(asked())

    def reset(self) -> None:
        """Mark all rows to be emptied before they are used again."""
        self._is_stale = True

    def ship(self) -> TorchShipment:
        """Queue the copy of all rows to the host."""
        with noting_failure(), torch.no_grad():
            self.enter()
            for host, part in zip(self.host, self._parts, strict=True):
                host.copy_(part, non_blocking=True)
            arrived = None
            if self.device.type != "cpu":
                arrived = torch.Event(self.device)
                arrived.record(_current_stream(self.device))
        return TorchShipment(self, arrived)

    def __del__(self) -> None:
        keep_if_failed(getattr(self, "host", None))


class TorchShipment:
    """Rows on their way from a device, to be taken before their arena is used again."""

    def __init__(self, arena: TorchArena, arrived: torch.Event | None) -> None:
        self._arena = arena
        self._arrived = arrived

    def ready(self) -> bool:
        """Return whether the rows have arrived; never waits."""
        with self._asking():
            return self._arrived is None or self._arrived.query()

    def take(self) -> tuple[Rows, Bins]:
        """Return rows and bins, waiting if they have not arrived (worker thread only)."""
        if self._arrived is not None:
            with noting_failure(), self._asking():
                self._arrived.synchronize()
        counts, averages, bins = (part.numpy() for part in self._arena.host)
        rows = np.concatenate([counts, averages], axis=1, dtype=np.float64)
        number = schema.finite(rows)
        with np.errstate(over="ignore"):  # squares beyond float64 are infinite
            rows[:, schema.M2] *= rows[:, schema.M2] * number
            rows[:, schema.ABS_SUM] *= number
        return rows, bins.astype(np.uint64)

    def _asking(self) -> AbstractContextManager[None]:
        return beside_captures() if self._arena.device.type == "cuda" else nullcontext()


@cache
def widest_float(device: torch.device) -> torch.dtype:
    """Return float64 if a device can calculate in it, else float32. Apple's GPUs cannot, nor can some of Intel's."""
    try:
        torch.ones(2, dtype=torch.float64, device=device).sum()
    except torch.OutOfMemoryError:  # unrelated to the dtype
        raise
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.float64


def _current_stream(device: torch.device) -> torch.Stream | None:
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)
