"""Listen to the steps of every optimizer of the process. Nothing is left on an optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from sonde.hooks.guard import Guarded, Handle, unless_compiling


def on_step(before: Guarded, after: Guarded) -> list[Handle]:
    """Call these with `(optimizer, args, kwargs)` around every step of every optimizer of the process."""
    return [
        register_optimizer_step_pre_hook(unless_compiling(before)),
        register_optimizer_step_post_hook(unless_compiling(after)),
    ]


def has_closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a step was called with a closure: its forward and backward are still to come."""
    # Hooks get the optimizer itself as the first of `args`; usually there is nothing else.
    if len(args) <= 1 and not kwargs:
        return False
    return any(callable(value) and not isinstance(value, Optimizer) for value in (*args, *kwargs.values()))
