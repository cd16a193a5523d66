"""Listen to the steps of every optimizer of the process. Nothing is left on an optimizer.

All listeners share one pair of hooks: torch calls each of its hooks in every step.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, Final

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from sonde.core.forks import after_fork_in_child
from sonde.hooks.guard import (
    During,
    Guard,
    Guarded,
    Handle,
    attach_to_guards,
    attempt,
    detach_from_guards,
    is_called,
    remove_all,
    unless_compiling,
)

# The code of the function that torch puts around every `step` and that calls the hooks.
_AROUND_STEP: Final[CodeType] = Optimizer.profile_hook_step(lambda self: None).__code__


class StepListener:
    """Callbacks for the steps of every optimizer, until `remove`."""

    def __init__(self, before: Guarded | None, after: Guarded | None, during: During) -> None:
        self.before, self.after, self._during = before, after, during
        attach_to_guards(self, (before, after))
        with _STEPS.lock:
            _STEPS.set((*_STEPS.listeners, self))

    @property
    def is_called(self) -> bool:
        """Whether it is called now."""
        return is_called((self.before, self.after), self._during)

    def remove(self) -> None:
        """Stop listening; doing so twice is fine."""
        with _STEPS.lock:
            _STEPS.set(tuple(each for each in _STEPS.listeners if each is not self))
        detach_from_guards(self, (self.before, self.after))


class _Steps:
    """The two hooks that all listeners share."""

    def __init__(self) -> None:
        self.renew_lock()
        self.listeners: tuple[StepListener, ...] = ()
        self._before: tuple[Guarded, ...] = ()
        self._after: tuple[Guarded, ...] = ()
        self._asleep = Guard.asleep
        self._tables: dict[frozenset[int], tuple[tuple[Guarded, ...], ...]] = {}
        self._handles: list[RemovableHandle] = []

    def renew_lock(self) -> None:
        """Forget which thread holds the lock: in a forked child that thread does not exist."""
        self.lock = threading.RLock()

    def set(self, listeners: tuple[StepListener, ...]) -> None:
        """Call these from now on. Torch's own hooks are there while there is any."""
        if listeners and not self._handles:
            self._handles = [
                register_optimizer_step_pre_hook(unless_compiling(self._call_before)),
                register_optimizer_step_post_hook(unless_compiling(self._call_after)),
            ]
        self.listeners, self._tables = listeners, {}
        try:
            self._settle()
        finally:
            if not listeners:
                remove_all(self._handles)

    def _settle(self) -> None:
        """Choose who is called, now that other guards are asleep."""
        self._asleep = asleep = Guard.asleep
        found = self._tables.get(asleep)
        if found is None:
            chosen = [each for each in self.listeners if each.is_called]
            found = self._tables[asleep] = (
                tuple(each.before for each in chosen if each.before is not None),
                tuple(each.after for each in chosen if each.after is not None),
            )
        self._before, self._after = found

    # Torch calls these two: what fails in them, outside of guarded callbacks, must not reach the program either.

    def _call_before(self, *args: Any) -> None:
        if self._asleep is not Guard.asleep:
            attempt(self._settle)
        before = self._before
        for each in before:
            each(*args)
        if self._asleep is not Guard.asleep:  # one of them has woken others, who take part in this very step
            attempt(self._settle)
            for each in self._before:
                if each not in before:
                    each(*args)

    def _call_after(self, *args: Any) -> None:
        if self._asleep is not Guard.asleep:
            attempt(self._settle)
        for each in self._after:
            each(*args)


_STEPS: Final = _Steps()
after_fork_in_child(_STEPS.renew_lock)


def on_step(before: Guarded, after: Guarded, during: During = "always") -> list[Handle]:
    """Call these with `(optimizer, args, kwargs)` around every step of every optimizer of the process."""
    return [StepListener(before, after, during)]


def after_step(after: Guarded, during: During = "always") -> Handle:
    """Call this with `(optimizer, args, kwargs)` after every step of every optimizer of the process."""
    return StepListener(None, after, during)


def has_closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a step was called with a closure: its forward and backward are still to come."""
    # Hooks get the optimizer itself as the first of `args`; usually there is nothing else.
    if len(args) <= 1 and not kwargs:
        return False
    return any(callable(value) and not isinstance(value, Optimizer) for value in (*args, *kwargs.values()))


def is_inside_step(outer: Optimizer) -> bool:
    """Return whether the step whose hook runs now was called from within a step of `outer`.

    The two hooks of `outer` cannot tell: a step that raises does not call the second.
    """
    frame: FrameType | None = sys._getframe(1)
    stepping = []
    while frame is not None:
        if frame.f_code is _AROUND_STEP:
            stepping.append(frame.f_locals.get("self"))
        frame = frame.f_back
    return any(each is outer for each in stepping[1:])
