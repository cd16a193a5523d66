"""Limit connections: their number, and how long a request may take to arrive."""

from __future__ import annotations

from asyncio import TimerHandle
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS: Final = 96
REQUEST_S: Final = 10.0
"""Seconds in which a connection must have sent a whole request, once it was made or has sent the first part."""


class BoundedProtocol(H11Protocol):
    """Uvicorn's protocol with bounds: without them, anyone who reaches the port can hold all descriptors.

    A connection that sends half a request, or none, is closed after `REQUEST_S`. Beyond `MOST_CONNECTIONS`, the oldest
    one that waits for a request makes room; one that is being answered stays.
    """

    began = 0.0
    _deadline: TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Take a connection, and start its clock."""
        super().connection_made(transport)
        self.began = self.loop.time()
        self._start_clock()
        others: list[Any] = [each for each in self.connections if each is not self and getattr(each, "waits", False)]
        others.sort(key=lambda each: each.began)
        for each in others[: max(0, len(self.connections) - MOST_CONNECTIONS)]:
            each.transport.abort()

    @property
    def waits(self) -> bool:
        """Whether no request is being answered."""
        cycle: Any = self.cycle  # none before the first request
        return cycle is None or bool(cycle.response_complete)

    def data_received(self, data: bytes) -> None:
        """Take a part of a request; the clock stops with the last one."""
        super().data_received(data)
        if not self.waits or self.transport.is_closing():
            self._stop_clock()
        elif self._deadline is None:  # the first part of a further request
            self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop_clock()
        super().connection_lost(exc)

    def _start_clock(self) -> None:
        self._deadline = self.loop.call_later(REQUEST_S, self._give_up)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if self.waits and not self.transport.is_closing():
            self.transport.abort()
