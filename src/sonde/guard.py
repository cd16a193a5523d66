"""The one place in the training thread that catches everything: a fault of Sonde's must not become one of the run."""

from __future__ import annotations

import functools
import logging
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Literal

OnError = Literal["isolate", "raise"]
Report = Callable[[str, str], None]
"""Takes the name of what failed and its traceback."""

logger = logging.getLogger("sonde")


class _Span:
    """One thread's time in guarded code."""

    __slots__ = ("began", "depth", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.depth = 0
        self.began = 0.0


class Meter(threading.local):
    """How long this thread has spent in guarded code, calls inside calls counted once."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.span = _Span()

    def total(self) -> float:
        """Return the seconds so far, those of a call that is still running included."""
        span = self.span
        return span.seconds + (self.clock() - span.began if span.depth else 0.0)


class Guard:
    """Runs Sonde's code inside the user's training step.

    With "isolate" a failing part is reported once, with its traceback, and goes quiet; the others go on. With "raise"
    its exception reaches the user.
    """

    def __init__(self, on_error: OnError, report: Report) -> None:
        self._on_error = on_error
        self._report = report
        self.failed: set[str] = set()
        self.meter = Meter()

    def wrap(self, part: str, function: Callable[..., None]) -> Callable[..., None]:
        """Return `function` guarded. The result always returns None, so as a hook it cannot replace a value."""
        if self._on_error == "raise":
            return function
        failed, meter, clock = self.failed, self.meter, self.meter.clock

        @functools.wraps(function)
        def guarded(*args: Any) -> None:
            if part in failed:
                return
            span = meter.span
            if not span.depth:
                span.began = clock()
            span.depth += 1
            try:
                function(*args)
            except Exception:  # noqa: BLE001 - this is the guard: whatever went wrong, training goes on
                failed.add(part)
                self._report(part, traceback.format_exc())
            finally:
                span.depth -= 1
                if not span.depth:
                    span.seconds += clock() - span.began

        return guarded


def warn_of_fault(part: str, trace: str) -> None:
    """Report a fault where there is no run to note it in."""
    logger.warning("%s failed and is switched off; training goes on without it.\n%s", part, trace.rstrip())
