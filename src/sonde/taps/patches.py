"""Stand in for functions of torch that have no hook, while somebody listens, and put them back exactly."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import has_torch_function

Heard = Callable[[tuple[Any, ...], dict[str, Any], Any], None]
"""Takes the arguments of a call and what it returned. Wrap it by a guard: what it raises, the user sees."""

_lock = threading.Lock()


class _Here(threading.local):
    """How many functions that are stood in for this thread is inside of."""

    depth = 0


_here = _Here()


class Patch:
    """One attribute of one module of torch, shared by all sessions.

    The replacement calls the original with the very arguments and returns the very result. Code that is compiled or
    scripted finds the original behind it. Something that overrides torch's functions is handed the original function
    too, since it may look it up in a table.

    Where one such function calls another, only listeners of the outer one are told.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self._owner = owner
        self._name = name
        self._listeners: tuple[Heard, ...] = ()
        self._original: Callable[..., Any] | None = None
        self._ours: Callable[..., Any] | None = None

    @property
    def is_there(self) -> bool:
        """Say whether this version of torch has the function."""
        return callable(getattr(self._owner, self._name, None))

    @property
    def is_listening(self) -> bool:
        """Say whether anybody listens."""
        return bool(self._listeners)

    def add(self, listener: Heard) -> None:
        """Call `listener` after every call from now on."""
        with _lock:
            if not self._listeners:
                self._put_in_place()
            self._listeners = (*self._listeners, listener)

    def remove(self, listener: Heard) -> None:
        """Stop calling `listener`. Without having listened, this does nothing."""
        with _lock:
            others = tuple(each for each in self._listeners if each is not listener)
            if self._listeners and not others:
                self._put_back()
            self._listeners = others

    def _put_in_place(self) -> None:
        present = getattr(self._owner, self._name)
        if self._ours is not None and present is not self._original:
            return  # someone had wrapped ours, so it had to stay in the chain; now it is of use again
        self._original = present
        self._ours = self._replacement(present)
        _teach_script(self._ours, present)
        setattr(self._owner, self._name, self._ours)

    def _put_back(self) -> None:
        # If someone wrapped ours, the original would throw theirs away; without listeners ours only passes on.
        if getattr(self._owner, self._name) is self._ours:
            setattr(self._owner, self._name, self._original)
            _builtin_table().pop(id(self._ours), None)
            self._ours = None

    def _replacement(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not self._listeners:
                return original(*args, **kwargs)
            _here.depth += 1
            try:
                if has_torch_function((*args, *kwargs.values())):
                    with self._aside():
                        result = original(*args, **kwargs)
                else:
                    result = original(*args, **kwargs)
            finally:
                _here.depth -= 1
            for listener in self._listeners if not _here.depth else ():
                listener(args, kwargs, result)
            return result

        # How torch marks a Python function that stands in for one that can be scripted. As an entry of the dictionary,
        # since inside a class Python would rename such an attribute.
        vars(replacement).update({"__script_if_tracing_wrapper": True, "__original_fn": original})
        return replacement

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Have the original in place for one call: its body names itself to what overrides it."""
        ours = getattr(self._owner, self._name)
        if ours is not self._ours:
            yield
            return
        setattr(self._owner, self._name, self._original)
        try:
            yield
        finally:
            setattr(self._owner, self._name, ours)


def _builtin_table() -> dict[int, str]:
    """Return torch's table of functions that scripted code may call, by id. It is made when first asked for.

    It must be made before anything is replaced: else it would know ours instead of the original for good.
    """
    table: dict[int, str] = torch.jit._builtins._get_builtin_table()  # type: ignore[no-untyped-call] # torch
    return table


def _teach_script(ours: Callable[..., Any], original: Callable[..., Any]) -> None:
    """Let code that is scripted while ours is in place find what the original stands for."""
    table = _builtin_table()
    if id(original) in table:
        table[id(ours)] = table[id(original)]
