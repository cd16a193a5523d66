"""What happens when a debugger fails: its error reaches the user, or is recorded with the sample."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sonde.debuggers.samples import SampleId
from sonde.errors import OptionError
from sonde.hooks.guard import Guard, OnError
from sonde.probes import kept_random_state

logger = logging.getLogger("sonde")


class _Datapoint(threading.local):
    """What went wrong with the datapoint that a thread is processing."""

    def __init__(self) -> None:
        self.failures: dict[str, str] = {}
        self.traces: dict[str, str] = {}
        self.not_run: list[str] = []


class Isolation:
    """Runs the code of debuggers. With "isolate", a failure is recorded with its samples and the next one is tried.

    The first failure of each debugger is logged with its samples; all are counted. Random numbers that debuggers in
    `user_written` draw are put back.
    """

    def __init__(self, on_error: OnError, user_written: Iterable[str] = ()) -> None:
        self.on_error = on_error
        self.num_failures = 0
        """How often a debugger failed."""
        self.devices: list[int] = []
        """The CUDA devices that the model is on."""
        self._user_written = frozenset(user_written)
        self._logged: set[str] = set()
        self._failed: dict[str, list[SampleId]] = {}
        self._errors: dict[str, str] = {}
        self._lock = threading.Lock()
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
            if self.on_error == "raise":
                function()
                return
            # A guard for this call only: it disables what fails, and here the next sample is tried again.
            Guard("isolate", self._record).wrap(name, function)()

    def _record(self, name: str, trace: str) -> None:
        self._datapoint.traces[name] = trace.rstrip()
        self._datapoint.failures[name] = trace.rstrip().splitlines()[-1]

    def finish(self, samples: Sequence[SampleId] | None = None) -> None:
        """End this thread's datapoint, or a pass that was none: log and count its failures, and forget them."""
        here = self._datapoint
        with self._lock:
            for name, error in here.failures.items():
                self.num_failures += 1
                if samples is not None:
                    self._errors.setdefault(name, error)
                    self._failed.setdefault(name, []).extend(samples)
                if name not in self._logged:
                    self._logged.add(name)
                    _log(name, samples or (), error, here.traces[name])
        here.failures, here.traces, here.not_run = {}, {}, []

    def take_failed(self) -> tuple[dict[str, list[SampleId]], dict[str, str]]:
        """Return, by debugger, the samples it failed on since the last call, and its first error."""
        with self._lock:
            failed, errors = self._failed, self._errors
            self._failed, self._errors = {}, {}
        return failed, errors

    def _kept_random_state(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return kept_random_state(self.devices) if name in self._user_written else contextlib.nullcontext()


def check_on_error(on_error: Any) -> None:
    """Check the option that names what an error does.

    Raises:
        OptionError: It is neither "isolate", "raise" nor None.

    """
    if on_error not in ("isolate", "raise", None):
        raise OptionError(f"on_error is 'isolate' or 'raise'; got {on_error!r:.80}.")


def _log(name: str, samples: Sequence[SampleId], error: str, trace: str) -> None:
    where = (
        f" on sample {samples[0]!r}" if len(samples) == 1 else f" on samples {list(samples)!r:.80}" if samples else ""
    )
    logger.warning(
        "Debugger %r failed%s: %s. The evaluation continues, and captures and scores mark the samples it failed on. "
        "Further failures of it are only counted; on_error='raise' stops instead.\n%s",
        name,
        where,
        error,
        trace,
    )
