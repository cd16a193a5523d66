"""What an error in a debugger means: it reaches the user, or it stays with the datapoint."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from sonde.errors import OptionError
from sonde.hooks.guard import Guard, OnError
from sonde.probes import kept_random_state

logger = logging.getLogger("sonde")


class _Datapoint(threading.local):
    """What is out of the ordinary about the datapoint that a thread is at."""

    def __init__(self) -> None:
        self.failures: dict[str, str] = {}
        self.not_run: list[str] = []


class Isolation:
    """Runs the work of debuggers. With "isolate", one that fails is reported once, and tried again on the next one.

    Random numbers that `strangers` draw are put back: what users write may draw some.
    """

    def __init__(self, on_error: OnError, strangers: Iterable[str] = ()) -> None:
        if on_error not in ("isolate", "raise"):
            raise OptionError(f"on_error is 'isolate' or 'raise'; got {on_error!r:.80}.")
        self.num_failures = 0
        """How often a debugger failed."""
        self.devices: list[int] = []
        """The CUDA devices that the model is on."""
        self._guard = Guard(on_error, self._report)
        self._strangers = frozenset(strangers)
        self._told: set[str] = set()
        self._datapoint = _Datapoint()

    @property
    def failures(self) -> dict[str, str]:
        """What went wrong with this thread's datapoint, by debugger."""
        return self._datapoint.failures

    @property
    def not_run(self) -> list[str]:
        """The debuggers whose layer did not run for this thread's datapoint."""
        return self._datapoint.not_run

    def run(self, name: str, function: Callable[[], None]) -> None:
        """Run a part of a debugger's work."""
        with self._kept_random_state(name):
            self._guard.wrap(name, function)()
        # The guard would keep the debugger quiet from now on; here one bad sample must not cost the others.
        self._guard.failed.discard(name)

    def forget(self) -> None:
        """Begin the next datapoint of this thread."""
        self._datapoint.failures, self._datapoint.not_run = {}, []

    def _kept_random_state(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return kept_random_state(self.devices) if name in self._strangers else contextlib.nullcontext()

    def _report(self, name: str, trace: str) -> None:
        self.num_failures += 1
        self._datapoint.failures[name] = trace.strip().splitlines()[-1]
        if name not in self._told:
            self._told.add(name)
            logger.warning(
                "Debugger %r failed; the datapoint is kept without it, and others go on. Further failures of it are "
                "only counted.\n%s",
                name,
                trace.rstrip(),
            )
