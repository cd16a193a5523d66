"""The capture buffer as a queue and a thread, and pickled pages for older tools."""

from __future__ import annotations

import queue
import tempfile
import threading
from pathlib import Path
from typing import Any

from sonde.capture import Capture, write_legacy_pages
from sonde.store.pages import BatchValue, load_debug_outputs


class BufferQueue(queue.Queue[Any]):
    """A view of the captures that wait to be written. Do not put items into it."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self._capture = capture

    def qsize(self) -> int:
        """Return how many captures wait for the writer; 0 while no folder is set."""
        return self._capture.num_pending if self._capture.folder is not None else 0

    def empty(self) -> bool:
        """Return whether no capture waits."""
        return self.qsize() == 0

    def join(self) -> None:
        """Wait until all captures are written, as long as the writer makes progress."""
        if self._capture.folder is not None:
            self._capture.flush()


class BufferThread(threading.Thread):
    """A stand-in for the writer thread, which runs only while there is something to write."""

    def __init__(self, capture: Capture) -> None:
        super().__init__(name="sonde-pages", daemon=True)
        self._capture = capture

    def is_alive(self) -> bool:
        """Return whether captures are written: True until the debugger is closed."""
        return not self._capture.is_closed


def _plain(value: Any) -> Any:
    """Return a value in which nothing but plain Python marks what was computed over a whole batch."""
    if isinstance(value, BatchValue):
        return {"scope": "batch", "value": value.value, "samples": list(value.samples)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return type(value)(map(_plain, value)) if isinstance(value, list | tuple) else value


def write_pickled_pages(capture: Capture, folder: str | Path, *, page_bytes: int) -> None:
    """Write waiting captures as `page_N.pkl`, through pages in a temporary folder, so that memory stays bounded."""
    with tempfile.TemporaryDirectory(prefix="sonde-pickle-") as scratch:
        capture.open(scratch)
        capture.seal()
        captured = load_debug_outputs(scratch, tensors="torch")
        items = ((name, {key: _plain(value) for key, value in captured[name].items()}) for name in captured)
        write_legacy_pages(folder, items, page_bytes=page_bytes)
