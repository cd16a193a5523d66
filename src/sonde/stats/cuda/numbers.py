"""Bring single numbers from a CUDA device to the host without waiting, many of them with one event.

A logged loss needs no kernel: its bytes are copied into pinned memory, and an event that is queued when the page of
numbers is handed over tells the worker thread when they have arrived.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

import torch
from torch import Tensor

from sonde.stats.cuda.driver import beside_captures, keep_if_failed, noting_failure
from sonde.stats.protocol import current_stream_handle

_SLOTS: Final = 64
_MOST_FREE: Final = 16


class _Page:
    """Pinned memory for numbers of one dtype that were queued on one stream."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.host = torch.zeros(_SLOTS, dtype=dtype, pin_memory=True)
        self.slots = list(self.host.unbind())
        self.used = 0
        self.stream = 0
        self.unread = 0
        self.arrived: torch.cuda.Event | None = None

    def __del__(self) -> None:
        keep_if_failed(getattr(self, "host", None))


class DeviceNumbers:
    """Copies numbers of one device to the host. `put` is called by the training thread, what it returns by the worker.

    A page is sealed when it is full, when the stream changes, and when the packets that use it are sent.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: dict[torch.dtype, _Page] = {}
        self._free: dict[torch.dtype, deque[_Page]] = {}
        self._lock = threading.Lock()

    def put(self, number: Tensor) -> Number:
        """Queue the copy of a tensor with one element, which lies on this device. Its graph is left alone."""
        stream = current_stream_handle(self._device.index)
        with self._lock:
            page = self._open.get(number.dtype)
            if page is None or page.used == _SLOTS or page.stream != stream:
                page = self._turn(page, number.dtype)
                page.stream = stream
            place = page.used
            page.used += 1
            page.unread += 1
        with torch.no_grad():
            page.slots[place].copy_(number.detach().reshape(()), non_blocking=True)
        return Number(self, page, place)

    def seal(self) -> None:
        """Queue an event behind the copies so far: what `put` has returned can be read once it has happened."""
        with self._lock:
            for page in self._open.values():
                self._seal(page)
            self._open.clear()

    def _turn(self, before: _Page | None, dtype: torch.dtype) -> _Page:
        if before is not None:
            self._seal(before)
        free = self._free.setdefault(dtype, deque(maxlen=_MOST_FREE))
        page = self._open[dtype] = free.popleft() if free else _Page(dtype)
        return page

    def _seal(self, page: _Page) -> None:
        stream = torch.cuda.default_stream(self._device)
        if page.stream:
            stream = torch.cuda.ExternalStream(page.stream, device=self._device)  # type: ignore[no-untyped-call]
        page.arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        page.arrived.record(stream)

    def take(self, page: _Page, place: int) -> float:
        """Wait for a number and return it; the page is used again when all of its numbers have been read."""
        if page.arrived is None:  # its packet was handed over without sealing
            self.seal()
        assert page.arrived is not None
        with noting_failure(), beside_captures():
            page.arrived.synchronize()
        value = float(page.host[place])
        with self._lock:
            page.unread -= 1
            if not page.unread and self._open.get(page.host.dtype) is not page:
                page.used, page.arrived = 0, None
                self._free.setdefault(page.host.dtype, deque(maxlen=_MOST_FREE)).append(page)
        return value


class Number:
    """A number on its way to the host."""

    __slots__ = ("_numbers", "_page", "_place")

    def __init__(self, numbers: DeviceNumbers, page: _Page, place: int) -> None:
        self._numbers, self._page, self._place = numbers, page, place

    def __call__(self) -> float:
        """Return it, waiting if it has not arrived; for the worker thread, once."""
        return self._numbers.take(self._page, self._place)
