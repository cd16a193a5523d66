"""Isolate Sonde's code from the user's training: the only place in the training thread that catches every exception.

A guard runs the callbacks of hooks, the methods that the program calls and the end of a session. It knows every hook
that was made for a callback of its own, so that none is left behind whatever fails. This module also knows what torch
is doing in this thread (compiling, capturing, a backward pass), when callbacks may do nothing.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any, ClassVar, Final, Literal, Protocol, TypeVar, cast

import torch

from sonde.core.forks import after_fork_in_child
from sonde.core.outcome import is_from_a_signal, what_to_log
from sonde.errors import NonFiniteError

T = TypeVar("T")
OnError = Literal["isolate", "raise"]
During = Literal["always", "awake", "asleep"]
"""When a listener is called: always, or only while its guard is awake, or asleep."""
Report = Callable[[str, str], None]
"""Takes the name of what failed and its traceback."""

logger = logging.getLogger("sonde")

is_compiling: Final = torch.compiler.is_compiling
"""Constant while `torch.compile` traces, so that code behind it never enters the graph."""
backward_id: Final[Callable[[], int]] = torch._C._current_graph_task_id
"""Returns the number of the backward pass that this thread runs, or -1. A forward inside one is a checkpoint that is
recomputed."""
_set_eval_frame: Final[Callable[[Any], Any]] = torch._C._dynamo.eval_frame.set_eval_frame
_innermost_transform: Final[Callable[[], object]] = torch._C._functorch.peek_interpreter_stack
_is_tracing: Final[Callable[[], bool]] = torch._C._is_tracing


class Guarded(Protocol):
    """A callback that `Guard.wrap` returned. Hooks take nothing else, so that none is left unguarded by mistake.

    Its attributes `guard` and `part` tell whose it is; `UNGUARDED` returns callbacks without them.
    """

    __wrapped__: Any

    def __call__(self, *args: Any) -> None:
        """Run the callback."""


class Handle(Protocol):
    """Something that can be removed: a hook, or a listener."""

    def remove(self) -> None:
        """Remove it; removing it twice is fine."""


class Paused(Protocol):
    """Something that must not see what Sonde's own code does."""

    def pause(self) -> bool:
        """Stop seeing what this thread does; return whether it did before."""

    def resume(self, was_paused: bool) -> None:
        """See it again if it did before, or if it began in guarded code."""


class _Span:
    """One thread's time in guarded code."""

    __slots__ = ("began", "depth", "is_paused", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.depth = 0
        self.began = 0.0
        self.is_paused = False


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

    paused: ClassVar[Paused | None] = None
    """What is paused while guarded code runs, of any session."""
    asleep: ClassVar[frozenset[int]] = frozenset()
    """The ids of guards most of whose callbacks are not called for the time being."""

    def __init__(self, on_error: OnError, report: Report, *, measures: bool = True) -> None:
        self._on_error = on_error
        self._measures = measures
        self._report = report
        self._unreported: list[str] = []
        self._parts: set[str] = set()
        self.failed: set[str] = set()
        self.attached: set[Handle] = set()
        """The hooks that call back through this guard."""
        self.meter = Meter()

    def wrap(self, part: str, function: Callable[..., None]) -> Guarded:
        """Return `function` guarded. The result always returns None, so as a hook it cannot replace a value."""
        if self._on_error == "raise":
            return self._own(part, self._measured(function)) if self._measures else cast(Guarded, function)
        return self._own(part, self._guarded(part, function))

    def catch(self, part: str, function: Callable[..., None]) -> Guarded:
        """Return `function` so that its exceptions do not reach the user, and nothing else: no time is measured.

        For callbacks that run thousands of times in a step, whose caller measures them and takes them aside.
        """
        if self._on_error == "raise":
            return cast(Guarded, function)
        failed, fail = self.failed, self._fail

        @functools.wraps(function)
        def caught(*args: Any) -> None:
            if part in failed:
                return
            # A clock may fail too, and so may whatever runs at the recursion limit.
            try:
                function(*args)
            except NonFiniteError:  # raised on purpose, by a session that was asked to stop
                raise
            except Exception:
                is_theirs = False
                try:  # noqa: SIM105 - `contextlib.suppress` needs stack frames of its own
                    is_theirs = fail(part)
                except Exception:  # noqa: BLE001 - no memory or stack left, or a logging handler that raises
                    pass
                if is_theirs:
                    raise

        return self._own(part, caught)

    def _guarded(self, part: str, function: Callable[..., None]) -> Callable[..., None]:
        """Return what `catch` and `_measured` do in one function: it is called for everything that is seen."""
        failed, fail, meter, clock = self.failed, self._fail, self.meter, self.meter.clock

        @functools.wraps(function)
        def guarded(*args: Any) -> None:
            if part in failed:
                return
            try:
                span = meter.span
                if span.depth:
                    function(*args)
                    return
                span.began = clock()
                if Guard.paused is not None:
                    span.is_paused = Guard.paused.pause()
                span.depth = 1
                try:
                    function(*args)
                finally:
                    span.depth = 0
                    try:
                        span.seconds += clock() - span.began
                    finally:
                        if Guard.paused is not None or span.is_paused:
                            self._resume(span)
            except NonFiniteError:  # raised on purpose, by a session that was asked to stop
                raise
            except Exception:
                is_theirs = False
                try:  # noqa: SIM105 - as in `catch`
                    is_theirs = fail(part)
                except Exception:  # noqa: BLE001 - as in `catch`
                    pass
                if is_theirs:
                    raise

        return guarded

    def _own(self, part: str, function: Callable[..., None]) -> Guarded:
        self._parts.add(part)
        vars(function).update(guard=self, part=part)
        return cast(Guarded, function)

    def _measured(self, function: Callable[..., None]) -> Callable[..., None]:
        """Return `function` with its time measured, and its exceptions let through."""
        meter, clock = self.meter, self.meter.clock

        @functools.wraps(function)
        def measured(*args: Any) -> None:
            span = meter.span
            if not span.depth:
                span.began = clock()
                if Guard.paused is not None:
                    span.is_paused = Guard.paused.pause()
            span.depth += 1
            try:
                function(*args)
            finally:
                span.depth -= 1
                if not span.depth:
                    try:
                        span.seconds += clock() - span.began
                    finally:
                        if Guard.paused is not None or span.is_paused:
                            self._resume(span)

        return measured

    def _resume(self, span: _Span) -> None:
        was_paused, span.is_paused = span.is_paused, False
        if Guard.paused is not None:
            Guard.paused.resume(was_paused)

    def wrap_all(self, callbacks: Sequence[tuple[str, Callable[..., None]]]) -> Guarded:
        """Return one function that calls all of these parts in turn, each guarded by itself.

        It costs one guarded call for all of them.
        """
        functions = [(part, function) for part, function in callbacks if part not in self.failed]
        if self._on_error == "raise" or not functions:
            return self.wrap("", functools.partial(_call_all, [function for _, function in functions]))
        failed, fail = self.failed, self._fail

        def call(*args: Any) -> None:
            for part, function in functions:
                if part in failed:
                    continue
                try:
                    function(*args)
                except Exception:
                    is_theirs = False
                    try:  # noqa: SIM105 - as above
                        is_theirs = fail(part)
                    except Exception:  # noqa: BLE001 - as above
                        pass
                    if is_theirs:
                        raise

        return self.wrap(", ".join(part for part, _ in functions), call)

    def _fail(self, part: str) -> bool:
        """Disable a part, then report it: what cannot be reported must still be disabled.

        Return True, and do nothing, for an exception that the program's own handler of a signal raised meanwhile (a
        time limit, a request to stop): it has to come out.
        """
        is_known = part in self.failed
        self.failed.add(part)
        if is_from_a_signal(sys.exception()):
            if not is_known:
                self.failed.discard(part)
            return True
        self._unreported.append(part)
        self._report(part, traceback.format_exc())
        self._unreported.remove(part)
        return False

    # ------------------------------------------------------------------ what the program calls itself

    def excuse(self, part: str, error: Exception) -> None:
        """Report a fault in something that the program called, once; called again, it is tried again.

        Raises:
            Exception: The error, if the user asked for that, or if it is the program's own.

        """
        is_theirs = self._on_error == "raise"
        try:
            is_theirs = is_theirs or is_from_a_signal(error)
            if not is_theirs and part not in self.failed:
                self._fail(part)
        except Exception:  # noqa: BLE001 - as in `catch`
            pass
        if is_theirs:
            raise error

    def run_each(self, actions: Sequence[tuple[str, Callable[[], object]]]) -> None:
        """Run all of these, whatever fails in between.

        Raises:
            BaseException: The first that is not for the guard to keep: Ctrl-C, or any if the user asked for that.

        """
        raised: BaseException | None = None
        for part, action in actions:
            try:
                action()
            except Exception as error:  # noqa: BLE001 - the others must run too
                try:
                    self.excuse(part, error)
                except Exception as theirs:  # noqa: BLE001 - as above
                    raised = raised or theirs
            except BaseException as error:  # noqa: BLE001 - as above
                raised = raised or error
        if raised is not None:
            raise raised

    def sleep(self) -> None:
        """Let listeners rest that are called only while this guard is awake."""
        with _sleep.lock:
            Guard.asleep = Guard.asleep | {id(self)}

    def wake(self) -> None:
        """Take back `sleep`."""
        with _sleep.lock:
            Guard.asleep = Guard.asleep - {id(self)}

    def report_late(self) -> None:
        """Report the parts whose fault could not be reported when it came, for want of memory or stack."""
        parts, self._unreported = self._unreported, []
        for part in parts:
            self._report(part, "There was no memory or no stack left for its traceback.")

    def release(self) -> None:
        """Remove every hook that calls back through this guard, and let no callback of it run again."""
        self.failed.update(self._parts)
        self.wake()
        remove_all(list(self.attached))
        remove_all(list(self.attached))  # those that could not be removed at first
        self.attached.clear()


class _SleepLock:
    """The lock for changing which guards are asleep."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Forget which thread holds the lock: in a forked child that thread does not exist."""
        self.lock = threading.Lock()


_sleep: Final = _SleepLock()
after_fork_in_child(_sleep.renew)


def isolated(
    guard_of_owner: Callable[[Any], Guard], instead: Callable[..., T], raises: tuple[type[Exception], ...]
) -> Callable[..., Any]:
    """Decorate a method that the program calls: after a fault of Sonde's it returns `instead(owner, ...)`.

    What a wrong argument raises goes through: `raises`, and Python's own error for arguments that it does not take.
    """

    def decorate(method: Callable[..., T]) -> Callable[..., T]:
        part, code = f"session.{method.__name__}", inspect.unwrap(method).__code__

        @functools.wraps(method)
        def call(owner: Any, *args: Any, **kwargs: Any) -> T:
            try:
                return method(owner, *args, **kwargs)
            except raises:
                raise
            except Exception as error:
                if isinstance(error, TypeError) and not _was_entered(code, error):
                    raise
                guard_of_owner(owner).excuse(part, error)
            return instead(owner, *args, **kwargs)

        return call

    return decorate


def _was_entered(code: CodeType, error: Exception) -> bool:
    """Return whether an error came from within a function."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not code:
        trace = trace.tb_next
    return trace is not None


def attempt(action: Callable[[], T]) -> T | Exception:
    """Return the result of an action, or the exception that it raised, unless it is the program's own."""
    try:
        return action()
    except Exception as error:
        if is_from_a_signal(error):
            raise
        return error


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Keep what the block does out of a tape: for code of Sonde's that the user calls."""
    paused = Guard.paused
    was_paused = paused is not None and paused.pause()
    try:
        yield
    finally:
        if was_paused and paused is not None:
            paused.resume(True)


def _call_all(functions: Sequence[Callable[..., None]], *args: Any) -> None:
    for function in functions:
        function(*args)


def warn_of_fault(part: str, trace: str) -> None:
    """Log a fault where there is no run to record it in."""
    logger.warning("%s failed and is switched off; training continues without it.\n%s", part, what_to_log(trace))


UNGUARDED: Final = Guard("raise", warn_of_fault, measures=False)
"""For callbacks whose exception must reach the user, and those that isolate themselves."""


def remove_all(handles: list[Any]) -> None:
    """Remove hooks and listeners, and empty the list. If one cannot be removed, that is logged and the rest go on."""
    theirs: Exception | None = None
    for handle in handles:
        try:
            handle.remove()
        except Exception as error:
            if is_from_a_signal(error):
                theirs = error
                handle.remove()
            else:
                logger.warning("a hook of Sonde's could not be removed", exc_info=True)
    handles.clear()
    if theirs is not None:
        raise theirs


class _Kept:
    """A hook of torch's that its guard knows."""

    def __init__(self, handle: Handle, guard: Guard) -> None:
        self._handle, self._guard = handle, guard

    def remove(self) -> None:
        """Remove the hook."""
        self._handle.remove()
        self._guard.attached.discard(self)


def guard_of(callback: Guarded | None) -> Guard | None:
    """Return the guard of a callback; None for one without."""
    return getattr(callback, "guard", None)


def keep(guard: Guard | None, handle: Handle) -> Handle:
    """Return a hook of torch's so that a guard knows it; without a guard as it is.

    The guard comes first: it has to be found before there is a hook that could be left behind.
    """
    if guard is None:
        return handle
    try:
        kept = _Kept(handle, guard)
        guard.attached.add(kept)
    except BaseException:
        handle.remove()
        raise
    return kept


def attach_to_guards(handle: Handle, callbacks: Sequence[Guarded | None]) -> None:
    """Let the guards of callbacks know what calls them."""
    for guard in _guards_of(callbacks):
        guard.attached.add(handle)


def detach_from_guards(handle: Handle, callbacks: Sequence[Guarded | None]) -> None:
    """Take back `attach_to_guards`."""
    for guard in _guards_of(callbacks):
        guard.attached.discard(handle)


def is_called(callbacks: Sequence[Guarded | None], during: During) -> bool:
    """Return whether a listener with these callbacks is called now, as far as its guards are awake or asleep."""
    if during == "always":
        return True
    is_asleep = any(id(guard) in Guard.asleep for guard in _guards_of(callbacks))
    return is_asleep is (during == "asleep")


def _guards_of(callbacks: Sequence[Guarded | None]) -> set[Guard]:
    return {guard for each in callbacks if (guard := guard_of(each)) is not None}


class Handles:
    """Handles that are removed together."""

    def __init__(self) -> None:
        self.handles: list[Handle] = []

    def remove(self) -> None:
        """Remove them all."""
        remove_all(self.handles)


def is_capturing() -> bool:
    """Return whether the running code is captured: by a CUDA graph on the current stream, or by `torch.jit.trace`.

    Nothing may be measured then: a replay would repeat it, into an arena that has long been shipped. The same holds
    inside a transform of `torch.func`, where tensors have no memory of their own and no other may be written to.
    """
    if _is_tracing() or _innermost_transform() is not None:
        return True
    # Asking torch first would start CUDA in a process that only uses the CPU.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call] # torch


def unless_compiling(hook: Callable[..., None]) -> Callable[..., None]:
    """Return `hook` so that under `torch.compile` only a constant test remains of it.

    Where a compiled function runs a part of itself uncompiled, torch would compile what that part calls: not Sonde.
    """

    def call(*args: Any) -> None:
        if not is_compiling():
            compiling = _set_eval_frame(None)
            try:
                hook(*args)
            finally:
                _set_eval_frame(compiling)

    return call
