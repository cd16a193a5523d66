"""The line of captures that wait in memory, bounded in bytes, and the one thread that writes them to pages."""

from __future__ import annotations

import logging
import threading
import traceback
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sonde.capture.fetch import Fetcher
from sonde.capture.item import Item
from sonde.capture.values import to_plain_outputs
from sonde.store.pages import PageWriter
from sonde.store.pages.record import Datapoint

logger = logging.getLogger("sonde")

MAX_FAILURES: Final = 100
"""How many failures are remembered; all are counted."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A capture that could not be written."""

    datapoint: Datapoint
    error: str
    traceback: str


class Worker:
    """A line of captures and the thread that writes them, in turn. `Capture` adds where they go and which of them stay.

    The thread lives only while there is something to write and somewhere to write it. Who looks at the line and then
    acts on it holds `_changed` meanwhile.
    """

    def __init__(self, max_pending_bytes: int) -> None:
        self.max_pending_bytes = max_pending_bytes
        self.written = 0
        """Captures that are safe on disk."""
        self.failed = 0
        """Captures that could not be written."""
        self.failures: list[Failure] = []
        """The first of them."""
        self._line: deque[Item] = deque()
        self._pending_bytes = 0
        self._unraised: list[Failure] = []
        self._writer: PageWriter | None = None
        self._fetcher = Fetcher()
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._closed = False

    @property
    def pending_bytes(self) -> int:
        """Bytes of captures that wait in memory."""
        return self._pending_bytes

    @property
    def num_pending(self) -> int:
        """Captures that wait in memory."""
        return len(self._line)

    @property
    def waiting(self) -> list[tuple[Datapoint, Mapping[str, Any]]]:
        """The captures that wait in memory, by datapoint, oldest first; for looking at, not for changing."""
        with self._changed:
            return [(item.datapoint, item.outputs) for item in self._line]

    def _has_room(self, nbytes: int) -> bool:
        """Say whether so many bytes fit; what is larger than the bound by itself does when nothing else waits."""
        return not self._pending_bytes or self._pending_bytes + nbytes <= self.max_pending_bytes

    def _put(self, item: Item, wait_s: float) -> bool:
        """Add to the end of the line, after waiting for room if need be; False if there was none, or it was closed."""
        with self._changed:
            has_room = self._changed.wait_for(lambda: self._closed or self._has_room(item.nbytes), wait_s)
            if self._closed or not has_room:
                return False
            self._line.append(item)
            self._pending_bytes += item.nbytes
            self._wake()
        return True

    def _write_to(self, writer: PageWriter) -> None:
        """Write what waits, and what comes, there."""
        with self._changed:
            self._writer = writer
            self._wake()

    def _drain(self, timeout_s: float) -> bool:
        """Wait until nothing is left to write; False if that took too long, or there is nowhere to write."""
        with self._changed:
            # Without a writer waiting is in vain.
            return self._changed.wait_for(lambda: not self._pending_bytes, timeout_s if self._writer else 0.0)

    def _take_writer(self, timeout_s: float) -> PageWriter | None:
        """Let go of the writer and return it once the thread has ended; None if the thread hangs in it."""
        with self._changed:
            writer, self._writer = self._writer, None
            idle = self._changed.wait_for(lambda: self._thread is None, timeout_s)
        return writer if idle else None

    def _forget(self) -> int:
        """Throw away what waits in memory; returns how many captures that were."""
        with self._changed:
            count = len(self._line)
            self._pending_bytes -= sum(item.nbytes for item in self._line)
            self._line.clear()
            self._changed.notify_all()
        return count

    def _join(self, timeout_s: float) -> None:
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _let_go(self) -> None:
        """Begin anew, in a forked child: files and thread belong to its parent, and the lock may be held there."""
        self._changed = threading.Condition()
        self._line.clear()
        self._pending_bytes = 0
        self._thread = self._writer = None

    def _wake(self) -> None:
        """Start the thread if there is something to write and none runs."""
        if self._thread is None and self._line and self._writer is not None:
            self._thread = threading.Thread(target=self._run, name="sonde-pages", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                writer = self._writer
                if not self._line or writer is None:
                    self._thread = None
                    self._changed.notify_all()
                    return
                item = self._line.popleft()
            failure = _write(writer, item, self._fetcher)
            with self._changed:
                self._pending_bytes -= item.nbytes
                if failure is None:
                    self.written += 1
                else:
                    self._note(failure)
                del item
                self._changed.notify_all()

    def _note(self, failure: Failure) -> None:
        self.failed += 1
        if self.failed == 1:
            logger.warning(
                "A capture of datapoint %r could not be written; others go on.\n%s",
                failure.datapoint,
                failure.traceback,
            )
        if len(self.failures) < MAX_FAILURES:
            self.failures.append(failure)
        self._unraised.append(failure)
        del self._unraised[MAX_FAILURES:]


def _write(writer: PageWriter, item: Item, fetcher: Fetcher) -> Failure | None:
    try:
        outputs, info = fetcher.fetch(item.outputs, item.ready), fetcher.fetch(item.info, item.ready)
        writer.add(item.datapoint, to_plain_outputs(outputs), info=to_plain_outputs(info))
    except Exception as error:  # noqa: BLE001 - the edge of this thread: no capture's fault may end it
        return Failure(item.datapoint, f"{type(error).__name__}: {error}", traceback.format_exc())
    return None
