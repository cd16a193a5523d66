"""Rows in device memory, copied to the host without waiting."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from sonde.core import schema
from sonde.core.schema import Bins, Rows
from sonde.stats.cuda.driver import beside_captures, keep_if_failed, noting_failure
from sonde.stats.protocol import current_stream_handle

_WORDS_PER_ROW: Final = schema.NUM_COLUMNS + schema.NUM_BINS


class DeviceArena:
    """Room for one step's rows on one CUDA device.

    Rows and bins lie in one allocation, so that one copy ships them, to pinned memory that stays with the arena.
    The arena also holds the scratch memory of the launches that write into it: partial rows, and one ticket per row
    that tells which block of a tensor is the last.

    An arena may be used from several streams in turn. Its users call `enter` first, which makes the current
    stream wait (on the device) for what was queued for this arena on the stream before.

    `reset` is called by the worker thread and only sets a flag: the next `enter` empties the rows, on its stream. So
    the worker never queues work, which could end up in a graph that another thread is capturing.
    """

    def __init__(self, capacity: int, index: int, partial_rows: int) -> None:
        if capacity < 1:
            raise ValueError(f"an arena needs at least one row, not {capacity}")
        self.capacity = capacity
        self.device = torch.device("cuda", index)
        self._index = index
        self._words = torch.zeros(capacity * _WORDS_PER_ROW, dtype=torch.int64, device=self.device)
        self.rows: Tensor = self._words[: capacity * schema.NUM_COLUMNS].view(torch.float64).view(capacity, -1)
        self.bins: Tensor = self._words[capacity * schema.NUM_COLUMNS :].view(capacity, schema.NUM_BINS)
        self.tickets: Tensor = torch.zeros(capacity, dtype=torch.int32, device=self.device)
        self.partials: Tensor = torch.empty((partial_rows, schema.NUM_COLUMNS), dtype=torch.float64, device=self.device)
        self.host = torch.empty(self._words.shape, dtype=torch.int64, device="cpu", pin_memory=True)
        self._is_stale = False
        self._stream = torch.cuda.current_stream(self.device)
        self.stream_handle: int = self._stream.cuda_stream
        self.nbytes = sum(map(_bytes_of, (self._words, self.tickets, self.partials)))
        self.addresses = (
            self.rows.data_ptr(),
            self.bins.data_ptr(),
            self.partials.data_ptr(),
            self.tickets.data_ptr(),
        )

    def enter(self) -> int:
        """Return the handle of the current stream, ordered after all that was queued for this arena so far."""
        handle = current_stream_handle(self._index)
        if handle != self.stream_handle:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
            self._stream = torch.cuda.current_stream(self.device)
            self._stream.wait_event(done)
            self.stream_handle = handle
        if self._is_stale:
            self._is_stale = False
            with torch.no_grad():
                self._words.zero_()
        return handle

    def reset(self) -> None:
        """Mark all rows to be emptied before they are used again."""
        self._is_stale = True

    def ship(self) -> DeviceShipment:
        """Queue the copy of all rows to pinned memory on the stream that wrote them, so that no other waits."""
        with noting_failure(), torch.cuda.stream(self._stream), torch.no_grad():
            self.enter()
            self.host.copy_(self._words, non_blocking=True)
            # Blocking: the worker thread that waits for it sleeps instead of burning a core.
            arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            arrived.record(self._stream)
        return DeviceShipment(self, arrived)

    def __del__(self) -> None:
        keep_if_failed(getattr(self, "host", None))


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class DeviceShipment:
    """Rows on their way from a CUDA device, to be taken before their arena is used again."""

    def __init__(self, arena: DeviceArena, arrived: torch.cuda.Event) -> None:
        self._arena = arena
        self._arrived = arrived

    def ready(self) -> bool:
        """Return whether the rows have arrived; never waits."""
        return bool(self._arrived.query())  # type: ignore[no-untyped-call]

    def take(self) -> tuple[Rows, Bins]:
        """Return rows and bins, waiting if they have not arrived (worker thread only)."""
        with noting_failure(), beside_captures():
            self._arrived.synchronize()
        words, capacity = self._arena.host.numpy(), self._arena.capacity
        split = capacity * schema.NUM_COLUMNS
        rows: Rows = words[:split].view(np.float64).reshape(capacity, schema.NUM_COLUMNS)
        bins: Bins = words[split:].view(np.uint64).reshape(capacity, schema.NUM_BINS)
        return rows, bins
