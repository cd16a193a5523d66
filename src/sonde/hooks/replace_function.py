"""Replace functions of torch that have no hook while there are listeners, and restore them exactly.

The replacement calls the original with the very arguments and returns the very result; code that is compiled finds the
original behind it. Any number of listeners share one replacement.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.overrides import has_torch_function
from torch.utils.data import dataloader

from sonde.core.forks import after_fork_in_child
from sonde.hooks.guard import (
    During,
    Guard,
    Guarded,
    attach_to_guards,
    detach_from_guards,
    is_called,
    is_compiling,
)


class _Lock:
    """The lock for putting replacements in place and back."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Forget which thread holds the lock: in a forked child that thread does not exist."""
        self.held = threading.RLock()


_lock: Final = _Lock()
after_fork_in_child(_lock.renew)


REPLACED: Final[set[ReplacedFunction]] = set()
"""The functions that someone listens to."""


class _Here(threading.local):
    """How many overridable functions that are stood in for this thread is inside of."""

    depth = 0


_here = _Here()


class Listener:
    """Callbacks for the calls of a function, until `remove`."""

    def __init__(
        self,
        function: ReplacedFunction,
        before: Guarded | None,
        end: Guarded | None,
        after: Guarded | None,
        during: During,
    ) -> None:
        self.before, self.end, self.after = before, end, after
        self._function, self._during = function, during

    @property
    def is_called(self) -> bool:
        """Whether it is called now."""
        return is_called((self.before, self.end, self.after), self._during)

    def remove(self) -> None:
        """Stop listening; doing so twice is fine."""
        self._function.drop(self)
        detach_from_guards(self, (self.before, self.end, self.after))


class ReplacedFunction:
    """One attribute of a module, class or object, for as long as it has listeners."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner = owner
        self._name = name
        self._is_inherited = False
        self._original: Any = None
        self._ours: Any = None
        self._listeners: tuple[Listener, ...] = ()
        self._before: tuple[Guarded, ...] = ()
        self._end: tuple[Guarded, ...] = ()
        self._after: tuple[Guarded, ...] = ()
        self._asleep = Guard.asleep
        self._tables: dict[frozenset[int], tuple[tuple[Guarded, ...], ...]] = {}

    @property
    def exists(self) -> bool:
        """Return whether this version of torch has the function."""
        return callable(getattr(self._owner, self._name, None))

    def __str__(self) -> str:
        return f"{getattr(self._owner, '__name__', type(self._owner).__name__)}.{self._name}"

    def listen(
        self,
        *,
        before: Guarded | None = None,
        end: Guarded | None = None,
        after: Guarded | None = None,
        during: During = "always",
    ) -> Listener:
        """Listen from now on, in the calling thread.

        Args:
            before: Takes the arguments and the named arguments of a call that begins.
            end: Called right after a call, also if it raised.
            after: Takes the arguments, the named arguments and the result of a call that returned; after every `end`.
            during: Whether it is called while its guard is asleep.

        """
        listener = Listener(self, before, end, after, during)
        attach_to_guards(listener, (before, end, after))
        with _lock.held:
            try:
                if not self._listeners:
                    self._put_in_place()
                    REPLACED.add(self)
                self._set((*self._listeners, listener))
            except BaseException:
                if not self._listeners:
                    self._put_back()
                    REPLACED.discard(self)
                raise
        return listener

    def drop(self, listener: Listener) -> None:
        """Stop calling a listener; one that does not listen is fine."""
        with _lock.held:
            others = tuple(each for each in self._listeners if each is not listener)
            if self._listeners and not others:
                self._put_back()
                REPLACED.discard(self)
            self._set(others)

    def _set(self, listeners: tuple[Listener, ...]) -> None:
        self._listeners = listeners
        self._tables = {}
        self._settle()

    def _settle(self) -> None:
        """Choose who is called, now that other guards are asleep. This is done when the function is called next."""
        self._asleep = asleep = Guard.asleep
        found = self._tables.get(asleep)
        if found is None:
            chosen = [each for each in self._listeners if each.is_called]
            found = self._tables[asleep] = (
                tuple(each.before for each in chosen if each.before is not None),
                tuple(each.end for each in reversed(chosen) if each.end is not None),
                tuple(each.after for each in chosen if each.after is not None),
            )
        self._before, self._end, self._after = found

    def _put_in_place(self) -> None:
        present = getattr(self._owner, self._name)
        if self._ours is not None and present is not self._original:
            return  # someone had wrapped ours, so it had to stay in the chain; now it is of use again
        self._is_inherited = self._name not in vars(self._owner)
        self._original, self._ours = present, self._replacement(present)
        setattr(self._owner, self._name, self._ours)

    def _put_back(self) -> None:
        # If another tool has wrapped our function, restoring the original would drop its wrapper. Without listeners
        # ours only passes calls on.
        if self._ours is None or getattr(self._owner, self._name) is not self._ours:
            return
        if self._is_inherited:  # an attribute of an object hides the method of its class
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._original)
        self._ours = None

    def _replacement(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if not self._listeners or is_compiling():
                return original(*args, **kwargs)
            if self._asleep is not Guard.asleep:
                self._settle()
            before, end, after = self._before, self._end, self._after
            for each in before:
                each(args, kwargs)
            if self._asleep is not Guard.asleep:  # one of them has woken others, who take part in this very call
                self._settle()
                for each in self._before:
                    if each not in before:
                        each(args, kwargs)
                end, after = self._end, self._after
            try:
                result = original(*args, **kwargs)
            finally:
                for each in end:
                    each()
            for each in after:
                each(args, kwargs, result)
            return result

        return replacement


class OverridableFunction(ReplacedFunction):
    """A function of torch that can be scripted, and overridden by subclasses of Tensor and by modes.

    Scripted code finds the original behind the replacement. Something that overrides torch's functions gets the
    original function too, since it may look it up in a table. Where one such function calls another, only listeners of
    the outer one are called. They listen with `after` only.
    """

    def _put_in_place(self) -> None:
        super()._put_in_place()
        _teach_script(self._ours, self._original)

    def _put_back(self) -> None:
        ours = self._ours
        super()._put_back()
        if self._ours is None:
            _builtin_table().pop(id(ours), None)

    def _replacement(self, original: Callable[..., Any]) -> Callable[..., Any]:
        _builtin_table()
        owner, name = self._owner, self._name

        @functools.wraps(original)
        def ours(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not self._listeners:
                return original(*args, **kwargs)
            if self._asleep is not Guard.asleep:
                self._settle()
            if not self._after:
                return original(*args, **kwargs)
            _here.depth += 1
            try:
                if has_torch_function((*args, *kwargs.values())) and getattr(owner, name) is ours:
                    # The body of the original names itself to what overrides it: have it in place for this call.
                    setattr(owner, name, original)
                    try:
                        result = original(*args, **kwargs)
                    finally:
                        setattr(owner, name, ours)
                else:
                    result = original(*args, **kwargs)
            finally:
                _here.depth -= 1
            for listener in self._after if not _here.depth else ():
                listener(args, kwargs, result)
            return result

        # How torch marks a Python function that replaces one that can be scripted. As an entry of the dictionary,
        # since inside a class Python would rename such an attribute.
        vars(ours).update({"__script_if_tracing_wrapper": True, "__original_fn": original})
        return ours


def _builtin_table() -> dict[int, str]:
    """Return torch's table of functions that scripted code may call, by id. It is made when first asked for.

    It must be made before anything is replaced: else it would know ours instead of the original for good.
    """
    table: dict[int, str] = torch.jit._builtins._get_builtin_table()  # type: ignore[no-untyped-call] # torch
    return table


def _teach_script(ours: Callable[..., Any], original: Callable[..., Any]) -> None:
    """Let code that is scripted while ours is in place find the original's operator."""
    table = _builtin_table()
    if id(original) in table:
        table[id(ours)] = table[id(original)]


LOADING: Final = ReplacedFunction(dataloader._BaseDataLoaderIter, "__next__")
"""Fetching a batch from any torch DataLoader."""
SCALING: Final = ReplacedFunction(torch.amp.GradScaler, "scale")
"""Scaling a loss by any gradient scaler; its first argument is the scaler."""
SCALED_STEP: Final = ReplacedFunction(torch.amp.GradScaler, "step")
"""The step of an optimizer by any gradient scaler, which may skip it; its first argument is the scaler."""
BACKWARD: Final = ReplacedFunction(torch.autograd, "backward")
"""A backward pass: `Tensor.backward` calls this attribute too. `torch.autograd.grad` is not seen."""
MODULE_CALL: Final = ReplacedFunction(torch.nn.Module, "__call__")
"""A call of any module, before torch looks for hooks: what is attached here takes part in the very call."""
NEW_OPTIMIZER: Final = ReplacedFunction(torch.optim.Optimizer, "__init__")
"""Making an optimizer; at the end of the call its parameter groups are there."""
