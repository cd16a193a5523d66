"""Classify how training ended from the exception that ended it."""

from __future__ import annotations

import functools
import signal
import traceback
from collections.abc import Iterable
from types import CodeType
from typing import Any, Final, Literal

Outcome = Literal["finished", "interrupted", "failed"]

_STOPPING: Final = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name)
)
"""The signals by which a person, a scheduler or a closed terminal asks a process to end."""


def outcome_of(error: BaseException | None) -> Outcome:
    """Return how training ended, given the exception that ended it; without one it finished.

    A training that was asked to stop was *interrupted*: by Ctrl-C, by a cancelled task, by anything that a signal's
    handler raises, or by exiting with the code that a shell gives to a signal (130, 143). `sys.exit()` without a code,
    or with 0, means that it finished.

    >>> outcome_of(KeyboardInterrupt()), outcome_of(SystemExit(0)), outcome_of(SystemExit("no data"))
    ('interrupted', 'finished', 'failed')
    """
    if error is None or isinstance(error, GeneratorExit):  # the consumer of a generator wants no more steps
        return "finished"
    # A cancelled task is known by its name: asyncio takes long to import, and reading a run comes by here too.
    if (
        isinstance(error, KeyboardInterrupt)
        or type(error).__name__ == "CancelledError"
        or is_from_a_signal(error, _STOPPING)
    ):
        return "interrupted"
    if not isinstance(error, SystemExit):
        return "failed"
    if error.code in [128 + number for number in _STOPPING]:
        return "interrupted"
    return "failed" if error.code else "finished"


def message_of(error: BaseException) -> str:
    """Return an exception's name and what it says.

    >>> message_of(ValueError("too long")), message_of(KeyboardInterrupt())
    ('ValueError: too long', 'KeyboardInterrupt')
    """
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - an exception of the program's own, which may not know how to print itself
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def is_from_a_signal(error: BaseException | None, numbers: Iterable[int] = ()) -> bool:
    """Return whether the program's handler of a signal raised an exception; of one of these signals, or of any."""
    handlers = map(signal.getsignal, numbers or signal.valid_signals())
    codes = {code for handler in handlers if callable(handler) and (code := _code_of(handler)) is not None}
    trace = None if error is None else error.__traceback__
    return bool(codes) and any(frame.f_code in codes for frame, _ in traceback.walk_tb(trace))


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not hasattr(handler, "__code__"):
        handler = type(handler).__call__
    return getattr(handler, "__code__", None)


def what_to_log(trace: str) -> str:
    r"""Return what to log of a fault's traceback: its last line if the system refused something, else all of it.

    >>> what_to_log("Traceback ...\nOSError: [Errno 28] No space left on device\n")
    'OSError: [Errno 28] No space left on device'
    """
    last = trace.rstrip().rpartition("\n")[2]
    return last if "[Errno " in last or "(os error " in last else trace.rstrip()
