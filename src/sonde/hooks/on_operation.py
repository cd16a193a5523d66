"""Observe every operation of torch that a thread runs, and the backward threads it starts, for a while.

Torch keeps a stack of dispatch modes per thread. An observer is pushed and removed by hooks, in the middle of the
user's code, so it never assumes that it is the innermost mode when it is removed.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from sonde.hooks.guard import Guard

Observe = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Runs an operation, given with its arguments, and returns its result."""

_len: Final[Callable[[], int]] = torch._C._len_torch_dispatch_stack
_at: Final[Callable[[int], Any]] = torch._C._get_dispatch_stack_at
_IGNORES_COMPILED: Final = hasattr(TorchDispatchMode, "ignore_compile_internals")


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch
    # Torch wraps the method of a mode so that it is never compiled. That takes longer than all else that is done for an
    # operation, and imports the compiler. A process that has compiled nothing needs no such wrapper.
    supports_higher_order_operators = True

    def __init__(self, observe: Observe) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch
        self.observe = observe

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code stay compiled: only what it calls outside its own kernels is observed."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.observe(func, args, kwargs or {})


class _ModeBesideCompiler(_Mode):  # type: ignore[no-untyped-call] # torch
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.observe(func, args, kwargs or {})


class OperationObserver:
    """Hands every operation of the present thread to `observe`, from `attach` to `remove`.

    It is attached in a guarded callback, and begins when that callback ends: guarded code pauses it.
    """

    def __init__(self, observe: Observe, guard: Guard) -> None:
        self._observe = observe
        self._guard = guard
        self._mode: _Mode | None = None
        self._has_begun = False
        self._is_paused = False
        self._thread = 0

    def attach(self) -> bool:
        """Start observing; return False, and do nothing, where a mode of someone else's could be disturbed.

        Inside another mode's `with` block ours would be popped in its place. An older torch gives up compiled code
        while any mode is there.
        """
        compiler = _has_compiled()
        if Guard.paused is not None or _len() > 0 or (compiler and not _IGNORES_COMPILED):
            return False
        self._mode = (_ModeBesideCompiler if compiler else _Mode)(self._observe)
        self._thread = threading.get_ident()
        self._guard.attached.add(self)
        Guard.paused = self
        if not self._guard.meter.span.depth:
            self._begin()
        return True

    def pause(self) -> bool:
        """Stop observing this thread; return whether it was observed."""
        if _len() and _at(_len() - 1) is self._mode:
            torch._C._pop_torch_dispatch_stack(None)
            self._is_paused = self._is_paused or threading.get_ident() == self._thread
            return True
        return False

    def resume(self, was_paused: bool) -> None:
        """Observe this thread again, or begin to."""
        if self._mode is not None and was_paused:
            torch._C._push_on_torch_dispatch_stack(self._mode)
            self._is_paused = self._is_paused and threading.get_ident() != self._thread
        elif not self._has_begun and threading.get_ident() == self._thread:
            self._begin()

    def _begin(self) -> None:
        if self._mode is not None:
            self._has_begun = True
            self._mode.__enter__()  # type: ignore[no-untyped-call] # torch

    def remove(self) -> None:
        """Stop observing; doing so twice is fine.

        From another thread, operations are only passed on from now on, until the thread next calls a module.
        """
        self._guard.attached.discard(self)
        mode, self._mode = self._mode, None
        if mode is None:
            return
        mode.observe = _pass_on
        Guard.paused = None
        if not self._has_begun:
            return
        if threading.get_ident() != self._thread:
            _take_out_later(mode, self._thread)
            return
        self._guard.meter.span.is_paused = False
        if self._is_paused:  # it is not on the stack now
            torch._C._push_on_torch_dispatch_stack(mode)
            self._is_paused = False
        try:
            _take_out(mode)
        except BaseException:
            self._mode = mode
            self._guard.attached.add(self)  # to be removed once more
            raise


def _has_compiled() -> bool:
    """Return whether anything was compiled in this process: its code calls ours, which must not be compiled too."""
    module = sys.modules.get("torch._dynamo.utils")
    return module is not None and bool(getattr(module, "counters", {"stats": 1}).get("frames"))


def _take_out(mode: _Mode) -> None:
    """Remove a mode, if it is there. If it lies below others, the one above it restores later what this one found."""
    if not any(_at(place) is mode for place in range(_len())):
        return
    if _at(_len() - 1) is mode:
        mode.__exit__(None, None, None)
        return
    above = []
    while _at(_len() - 1) is not mode:
        above.append(torch._C._pop_torch_dispatch_stack(None))
    torch._C._pop_torch_dispatch_stack(None)
    for name, flags in vars(mode).items():
        theirs = getattr(above[-1], name, None)
        if isinstance(flags, deque) and isinstance(theirs, deque) and flags and theirs:
            theirs[-1] = flags.pop()
    for each in reversed(above):
        torch._C._push_on_torch_dispatch_stack(each)


def _take_out_later(mode: _Mode, thread: int) -> None:
    """Remove a mode from the stack of another thread, which only that thread can do: when it next calls a module."""

    def take_out(*_: Any) -> None:
        if threading.get_ident() == thread:
            handle.remove()
            _take_out(mode)

    handle = register_module_forward_pre_hook(take_out)


def _pass_on(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)
