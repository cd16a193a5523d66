"""Isolate Sonde's callbacks from the user's training: this is the one place in the training thread that catches all.

It also knows what torch is doing in this thread (compiling, capturing, a backward pass), when callbacks may do nothing.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, Protocol, cast

import torch

OnError = Literal["isolate", "raise"]
Report = Callable[[str, str], None]
"""Takes the name of what failed and its traceback."""

logger = logging.getLogger("sonde")

is_compiling: Final = torch.compiler.is_compiling
"""Constant while `torch.compile` traces, so that code behind it never enters the graph."""
backward_id: Final[Callable[[], int]] = torch._C._current_graph_task_id
"""Returns the number of the backward pass that this thread runs, or -1. A forward inside one is a checkpoint that is
recomputed."""
_innermost_transform: Final[Callable[[], object]] = torch._C._functorch.peek_interpreter_stack


class Guarded(Protocol):
    """A callback that `Guard.wrap` returned. Hooks take nothing else, so that none is left unguarded by mistake."""

    __wrapped__: Any

    def __call__(self, *args: Any) -> None:
        """Run the callback."""


class Handle(Protocol):
    """Something that can be removed: a hook, or a listener."""

    def remove(self) -> None:
        """Remove it; removing it twice is fine."""


class _Span:
    """One thread's time in guarded code."""

    __slots__ = ("began", "depth", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.depth = 0
        self.began = 0.0


class Meter(threading.local):
    """The time this thread has spent in guarded code; nested calls are counted once."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.span = _Span()

    def total(self) -> float:
        """Return the seconds so far, including those of a call that is still running."""
        span = self.span
        return span.seconds + (self.clock() - span.began if span.depth else 0.0)


class Guard:
    """Runs Sonde's code inside the user's training step.

    With "isolate" a part that fails is reported once, with its traceback, and disabled; the others continue. With
    "raise" its exception reaches the user.
    """

    def __init__(self, on_error: OnError, report: Report) -> None:
        self._on_error = on_error
        self._report = report
        self.failed: set[str] = set()
        self.meter = Meter()

    def wrap(self, part: str, function: Callable[..., None]) -> Guarded:
        """Return `function` guarded. The result always returns None, so as a hook it cannot replace a value."""
        if self._on_error == "raise":
            return cast(Guarded, function)
        failed, meter, clock, fail = self.failed, self.meter, self.meter.clock, self._fail

        @functools.wraps(function)
        def guarded(*args: Any) -> None:
            if part in failed:
                return
            # Everything is inside the `try`: a clock may fail too, and so may whatever runs at the recursion limit.
            try:
                span = meter.span
                if not span.depth:
                    span.began = clock()
                span.depth += 1
                try:
                    function(*args)
                finally:
                    span.depth -= 1
                    if not span.depth:
                        span.seconds += clock() - span.began
            except Exception:  # noqa: BLE001 - this is the guard: whatever went wrong, training continues
                try:  # noqa: SIM105 - `contextlib.suppress` needs stack frames of its own
                    fail(part)
                except Exception:  # noqa: BLE001 - no memory or stack left, or a logging handler that raises
                    pass

        return cast(Guarded, guarded)

    def wrap_all(self, callbacks: Sequence[tuple[str, Callable[..., None]]]) -> Guarded:
        """Return one function that calls all of these parts in turn, each guarded by itself.

        It costs one guarded call for all of them.
        """
        functions = [(part, function) for part, function in callbacks if part not in self.failed]
        if self._on_error == "raise" or not functions:
            return cast(Guarded, functools.partial(_call_all, [function for _, function in functions]))
        failed, fail = self.failed, self._fail

        def call(*args: Any) -> None:
            for part, function in functions:
                if part in failed:
                    continue
                try:
                    function(*args)
                except Exception:  # noqa: BLE001 - the other parts continue
                    try:  # noqa: SIM105 - as above
                        fail(part)
                    except Exception:  # noqa: BLE001 - as above
                        pass

        return self.wrap(", ".join(part for part, _ in functions), call)

    def _fail(self, part: str) -> None:
        """Disable a part, then report it: what cannot be reported must still be disabled."""
        self.failed.add(part)
        self._report(part, traceback.format_exc())


def _call_all(functions: Sequence[Callable[..., None]], *args: Any) -> None:
    for function in functions:
        function(*args)


def warn_of_fault(part: str, trace: str) -> None:
    """Log a fault where there is no run to record it in."""
    logger.warning("%s failed and is switched off; training goes on without it.\n%s", part, trace.rstrip())


UNGUARDED: Final = Guard("raise", warn_of_fault)
"""For callbacks whose exception is meant to reach the user, and those that isolate themselves."""


def remove_all(handles: list[Any]) -> None:
    """Remove hooks and listeners, and empty the list. If one cannot be removed, that is logged and the rest go on."""
    for handle in handles:
        try:
            handle.remove()
        except Exception:
            logger.warning("a hook of Sonde's could not be removed", exc_info=True)
    handles.clear()


def is_capturing() -> bool:
    """Return whether the running code is captured: by a CUDA graph on the current stream, or by `torch.jit.trace`.

    Nothing may be measured then: a replay would repeat it, into an arena that has long been shipped. The same holds
    inside a transform of `torch.func`, where tensors have no memory of their own and no other may be written to.
    """
    if torch.jit.is_tracing() or _innermost_transform() is not None:  # type: ignore[attr-defined, no-untyped-call] # torch
        return True
    # Asking torch first would start CUDA in a process that only uses the CPU.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call] # torch


def unless_compiling(hook: Callable[..., None]) -> Callable[..., None]:
    """Return `hook` so that under `torch.compile` only a constant test remains of it."""

    def call(*args: Any) -> None:
        if not is_compiling():
            hook(*args)

    return call
