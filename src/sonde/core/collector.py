"""Keep the garbage collector from running at a bad moment."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from sonde.core.forks import after_fork_in_child

T = TypeVar("T")


class _Uncollected:
    """Calls functions while the garbage collector does not run, in one thread at a time.

    For `torch.get_rng_state`, which holds a lock of torch's while it makes a tensor. If a collection ran then, and a
    finalizer gave up Python's lock, another thread that asks for that state would wait for ever, with Python's lock.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the program's handler of a signal may come back here
        self._is_disabled = False

    def __call__(self, function: Callable[[], T]) -> T:
        """Return what a function returns."""
        # Nothing of Sonde's is called in order to give the lock back: whatever fails here, it is given back.
        with self._lock:
            if not gc.isenabled():
                return function()
            self._is_disabled = True
            gc.disable()
            try:
                return function()
            finally:
                gc.enable()
                self._is_disabled = False

    def renew_lock(self) -> None:
        """Forget which thread holds the lock: in a forked child that thread does not exist."""
        if self._is_disabled:
            gc.enable()
        self._lock, self._is_disabled = threading.RLock(), False


class _FewerCollections:
    """While a block runs, lets the collector run after far more new objects, and never look at all objects.

    Taping a step and reading tapes makes tens of thousands of objects. Without this they would make the collector go
    through every object of the program, 0.1 to 0.2 s each time where torch is loaded, in the thread that trains. The
    program's own garbage is still collected, about as often as without Sonde. Blocks may overlap, in any threads.
    """

    _NEW = 20_000
    _OLD = 1 << 20

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the program's handler of a signal may come back here
        self._active = 0
        self._before = self._raised = gc.get_threshold()

    def __enter__(self) -> None:
        """Raise the thresholds."""
        with self._lock:
            self._active += 1
            if self._active == 1:
                new, middle, old = self._before = gc.get_threshold()
                self._raised = (max(new, self._NEW) if new else 0, middle, max(old, self._OLD))
                gc.set_threshold(*self._raised)

    def __exit__(self, *exception: object) -> None:
        """Restore the thresholds, unless the program has changed them."""
        with self._lock:
            self._active -= 1
            if not self._active:
                self._restore()

    def _restore(self) -> None:
        if gc.get_threshold() == self._raised:
            gc.set_threshold(*self._before)

    def renew_lock(self) -> None:
        """Forget which threads are in a block: in a forked child they do not exist."""
        if self._active:
            self._restore()
        self._lock, self._active = threading.RLock(), 0


uncollected: Final = _Uncollected()
fewer_collections: Final = _FewerCollections()
after_fork_in_child(uncollected.renew_lock)
after_fork_in_child(fewer_collections.renew_lock)
