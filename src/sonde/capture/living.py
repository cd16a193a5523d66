"""Handle captures that are open when their process forks or ends."""

from __future__ import annotations

import atexit
import logging
import os
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

from sonde.errors import RunError

if TYPE_CHECKING:
    from sonde.capture.capture import Capture

logger = logging.getLogger("sonde")

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
os.register_at_fork(after_in_child=_abandon_in_child)
atexit.register(_close_at_exit)
