"""Know when a function of torch begins and ends, by standing in for the attribute it is called through.

Torch has no hook for the data loader's `next` nor for a backward pass. The attribute is replaced while somebody listens
and put back, the very same object, when the last listener leaves. The call itself goes through unchanged.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils.data import dataloader


@dataclass(frozen=True, slots=True, eq=False)
class Listener:
    """Called in the calling thread, right before and right after; `end` also if the call raises. Neither may raise."""

    begin: Callable[[], None]
    end: Callable[[], None]
    see: Callable[[tuple[Any, ...]], None] | None = None
    """Handed the call's positional arguments before `begin`."""
    done: Callable[[], None] | None = None
    """Called after `end` if the call did not raise."""


class WrappedCall:
    """One attribute that can be listened to, by any number of listeners at once."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner = owner
        self._name = name
        self._lock = threading.Lock()
        self._listeners: tuple[Listener, ...] = ()
        self._original: Any = None
        self._ours: Any = None

    def attach(self, listener: Listener) -> None:
        """Begin to call a listener."""
        with self._lock:
            if self._ours is None:
                self._put_in_place()
            self._listeners = (*self._listeners, listener)

    def remove(self, listener: Listener) -> None:
        """Stop calling a listener; one that was never attached is fine."""
        with self._lock:
            self._listeners = tuple(each for each in self._listeners if each is not listener)
            # If somebody has wrapped ours meanwhile, theirs must stay; without listeners ours only passes on.
            if not self._listeners and self._ours is not None and getattr(self._owner, self._name) is self._ours:
                setattr(self._owner, self._name, self._original)
                self._original = self._ours = None

    def renew_lock(self) -> None:
        """Forget who held the lock: in a forked child that thread does not exist."""
        self._lock = threading.Lock()

    def _put_in_place(self) -> None:
        original = self._original = getattr(self._owner, self._name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            listeners = self._listeners
            if not listeners or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            for listener in listeners:
                if listener.see is not None:
                    listener.see(args)
                listener.begin()
            try:
                result = original(*args, **kwargs)
            finally:
                for listener in reversed(listeners):
                    listener.end()
            for listener in listeners:
                if listener.done is not None:
                    listener.done()
            return result

        self._ours = wrapped
        setattr(self._owner, self._name, wrapped)


LOADING: Final = WrappedCall(dataloader._BaseDataLoaderIter, "__next__")
"""Fetching a batch from any torch DataLoader."""
BACKWARD: Final = WrappedCall(torch.autograd, "backward")
"""A backward pass: `Tensor.backward` calls this attribute too. `torch.autograd.grad` does not."""

if hasattr(os, "register_at_fork"):
    for _call in (LOADING, BACKWARD):
        os.register_at_fork(after_in_child=_call.renew_lock)
