"""Classify how training ended from the exception that ended it."""

from __future__ import annotations

import signal
import traceback
from typing import Final, Literal

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
    if isinstance(error, KeyboardInterrupt) or type(error).__name__ == "CancelledError" or _is_from_a_signal(error):
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
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _is_from_a_signal(error: BaseException) -> bool:
    handlers = (signal.getsignal(number) for number in _STOPPING)
    codes = {code for handler in handlers if (code := getattr(handler, "__code__", None)) is not None}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))
