"""Listen to the steps of every optimizer of the process. Nothing is left on an optimizer."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, Final

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from sonde.hooks.guard import Guarded, Handle, guard_of, keep, unless_compiling

# The code of the function that torch puts around every `step` and that calls the hooks.
_AROUND_STEP: Final[CodeType] = Optimizer.profile_hook_step(lambda self: None).__code__


def on_step(before: Guarded, after: Guarded) -> list[Handle]:
    """Call these with `(optimizer, args, kwargs)` around every step of every optimizer of the process."""
    return [keep(guard_of(before), register_optimizer_step_pre_hook(unless_compiling(before))), after_step(after)]


def after_step(after: Guarded) -> Handle:
    """Call this with `(optimizer, args, kwargs)` after every step of every optimizer of the process."""
    return keep(guard_of(after), register_optimizer_step_post_hook(unless_compiling(after)))


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
