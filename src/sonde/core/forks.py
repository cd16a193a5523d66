"""Run code in processes that are forked from this one, on systems that fork."""

from __future__ import annotations

import os
from collections.abc import Callable


def after_fork_in_child(call: Callable[[], object]) -> None:
    """Call a function in every child that is forked from now on; do nothing where processes never fork (Windows).

    A forked child, such as a worker of a DataLoader, inherits hooks, files and locks but no threads.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)
