"""Events in the streams of one CUDA device, which tell when work has got there without anybody waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

import torch

from sonde.hooks.torch_state import is_capturing

_MOST_FREE: Final = 1024


class EventPool:
    """Events of one device, used again when they have been read.

    An event belongs to the device whose stream it was put into first, so no two devices may share a pool.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: deque[torch.cuda.Event] = deque(maxlen=_MOST_FREE)

    def record(self) -> torch.cuda.Event | None:
        """Put an event into the device's current stream; None while that is captured into a graph."""
        if self.is_captured():
            return None
        try:
            event = self._free.popleft()
        except IndexError:  # without asking first: several threads may take and give back
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def give_back(self, events: Iterable[torch.cuda.Event]) -> None:
        """Take events that nobody needs any more."""
        self._free.extend(events)

    def is_captured(self) -> bool:
        """Say whether the device's current stream is captured into a graph."""
        with torch.cuda.device(self.device):
            return is_capturing()
