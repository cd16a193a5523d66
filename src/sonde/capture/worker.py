"""The queue of captures in memory, bounded in bytes, and the one thread that writes them to pages."""

from __future__ import annotations

import atexit
import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

from sonde.capture.fetch import Fetcher
from sonde.capture.values import Item, to_plain_outputs
from sonde.core.forks import after_fork_in_child
from sonde.errors import RunError
from sonde.store.pages import PageWriter
from sonde.store.pages.record import Datapoint

if TYPE_CHECKING:
    from sonde.capture.capture import Capture


logger = logging.getLogger("sonde")

MAX_FAILURES: Final = 100
"""How many failures are remembered; all are counted."""

SLOWEST_BYTES_PER_S: Final = 1 << 20
"""A single capture that is written more slowly than this counts as a stall."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A capture that could not be written."""

    datapoint: Datapoint
    error: str
    traceback: str


class Worker:
    """A queue of captures and the thread that writes them in order. `Capture` decides where they go and which stay.

    The thread runs only while there is something to write and somewhere to write it. Waiting for it has no fixed
    deadline: it lasts as long as captures reach the disk, and ends when none has for `stall_timeout_s`. Code that reads
    the queue and then acts on it holds `_changed` meanwhile.
    """

    def __init__(self, max_pending_bytes: int, stall_timeout_s: float, monotonic: Callable[[], float]) -> None:
        self.max_pending_bytes = max_pending_bytes
        self.stall_timeout_s = stall_timeout_s
        self.written = 0
        """Captures that are safe on disk."""
        self.failed = 0
        """Captures that could not be written."""
        self.failures: list[Failure] = []
        """The first of them."""
        self._queue: deque[Item] = deque()
        self._pending_bytes = 0
        self._lost: dict[Datapoint, str] = {}
        self._unraised: list[Failure] = []
        self._writer: PageWriter | None = None
        self._fetcher = Fetcher()
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._paused = False
        self._monotonic = monotonic
        self._progress_at = 0.0
        self._bytes_in_hand = 0

    @property
    def pending_bytes(self) -> int:
        """Bytes of captures that wait in memory."""
        return self._pending_bytes

    @property
    def num_pending(self) -> int:
        """Captures that wait in memory."""
        return len(self._queue)

    @property
    def waiting(self) -> list[tuple[Datapoint, Mapping[str, Any]]]:
        """The captures that wait in memory, by datapoint, oldest first. Do not change them."""
        with self._changed:
            return [(item.datapoint, item.outputs) for item in self._queue]

    def _has_room(self, nbytes: int) -> bool:
        """Return whether this many bytes fit. A capture above the bound fits when nothing else waits."""
        return not self._pending_bytes or self._pending_bytes + nbytes <= self.max_pending_bytes

    def _put(self, item: Item, stall_timeout_s: float) -> bool:
        """Append to the queue, after waiting for room if needed; False if there was none, or it was closed."""
        with self._changed:
            has_room = self._wait(lambda: self._closed or self._has_room(item.nbytes), stall_timeout_s)
            if self._closed or not has_room:
                return False
            self._queue.append(item)
            self._pending_bytes += item.nbytes
            self._wake()
        return True

    def _write_to(self, writer: PageWriter) -> None:
        """Write what waits, and what is added later, with this writer."""
        with self._changed:
            self._writer = writer
            self._wake()

    def _wait(self, done: Callable[[], bool], stall_timeout_s: float) -> bool:
        """Wait until `done()`; False once the thread has written nothing for `stall_timeout_s`.

        One large capture gets the time that a slow disk needs for it.
        """
        with self._changed:
            while not done():
                allowed = stall_timeout_s and max(stall_timeout_s, self._bytes_in_hand / SLOWEST_BYTES_PER_S)
                left = allowed - (self._monotonic() - self._progress_at)
                if left <= 0:
                    return False
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
            return True

    def _drain(self, stall_timeout_s: float) -> bool:
        """Wait until nothing is left to write; False if the thread stalls, or there is nowhere to write."""
        with self._changed:
            if self._writer is None:
                return not self._pending_bytes
            return self._wait(lambda: not self._pending_bytes, stall_timeout_s)

    def _take_writer(self, stall_timeout_s: float) -> PageWriter | None:
        """Stop writing and return the writer once the thread has ended; None if the thread hangs in it."""
        with self._changed:
            # The writer stays until then, so that `add` waits for room instead of looking for another place.
            self._paused = True
            idle = self._wait(lambda: self._thread is None, stall_timeout_s)
            writer, self._writer = self._writer, None
            self._paused = False
        return writer if idle else None

    def _forget(self) -> list[Datapoint]:
        """Discard the captures that wait in memory, and return which they were."""
        with self._changed:
            forgotten = [item.datapoint for item in self._queue]
            self._pending_bytes -= sum(item.nbytes for item in self._queue)
            self._queue.clear()
            self._changed.notify_all()
        return forgotten

    def _join(self, timeout_s: float) -> None:
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _reset_after_fork(self) -> None:
        """Start afresh in a forked child: files and thread belong to its parent, and the lock may be held there."""
        self._changed = threading.Condition()
        self._queue.clear()
        self._pending_bytes = 0
        self._thread = self._writer = None

    def _wake(self) -> None:
        """Start the thread if there is something to write and none runs."""
        if self._thread is None and self._queue and self._writer is not None and not self._paused:
            self._progress_at = self._monotonic()
            self._thread = threading.Thread(target=self._run, name="sonde-pages", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                writer = self._writer
                if not self._queue or writer is None or self._paused:
                    self._thread = None
                    self._changed.notify_all()
                    return
                item = self._queue.popleft()
                self._bytes_in_hand = item.nbytes
            failure = _write(writer, item, self._fetcher)
            with self._changed:
                self._pending_bytes -= item.nbytes
                self._bytes_in_hand = 0
                self._progress_at = self._monotonic()
                if failure is None:
                    self.written += 1
                else:
                    self.failed += 1
                    self._lost[failure.datapoint] = failure.error
                    self._note(failure)
                del item
                self._changed.notify_all()

    def _note(self, failure: Failure) -> None:
        """Remember why a capture is lost, and log the first one."""
        if not self.failures:
            logger.warning(
                "The capture of datapoint %r could not be written: %s. Other captures continue; further failures are "
                "only counted.%s",
                failure.datapoint,
                failure.error,
                f"\n{failure.traceback}" if failure.traceback else "",
            )
        if len(self.failures) < MAX_FAILURES:
            self.failures.append(failure)
        self._unraised.append(failure)


def _write(writer: PageWriter, item: Item, fetcher: Fetcher) -> Failure | None:
    try:
        outputs, info = fetcher.fetch(item.outputs, item.ready), fetcher.fetch(item.info, item.ready)
        writer.add(item.datapoint, to_plain_outputs(outputs), info=to_plain_outputs(info))
    except Exception as error:  # noqa: BLE001 - the edge of this thread: no capture's fault may end it
        return Failure(item.datapoint, f"{type(error).__name__}: {error}", traceback.format_exc())
    return None


# --------------------------------------------------------------------------------
# Handle captures that are open when their process forks or ends.


_EXIT_S: Final = 10.0

living: WeakSet[Capture] = WeakSet()
"""The open captures of this process."""


def _abandon_in_child() -> None:
    for capture in list(living):
        capture._abandon()
    living.clear()


def _close_at_exit() -> None:
    for capture in list(living):
        try:
            capture.close(_EXIT_S)
        except (OSError, RunError) as error:
            logger.warning("Captures could not be finished: %s", error)


# A forked child (a DataLoader worker) inherits files and locks but no thread: it must release them at once.
after_fork_in_child(_abandon_in_child)
atexit.register(_close_at_exit)
