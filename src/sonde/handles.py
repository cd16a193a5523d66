"""Hooks of torch: put on so that compiled code has none of them, and taken away again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle


def unless_compiling(hook: Callable[..., None]) -> Callable[..., None]:
    """Return `hook` so that under `torch.compile` it is a test that is constant there, and nothing else."""

    def call(*args: Any) -> None:
        if not torch.compiler.is_compiling():
            hook(*args)

    return call


def around_steps(before: Callable[..., None], after: Callable[..., None]) -> list[RemovableHandle]:
    """Call these with `(optimizer, args, kwargs)` around every step of every optimizer of the process."""
    return [
        register_optimizer_step_pre_hook(unless_compiling(before)),
        register_optimizer_step_post_hook(unless_compiling(after)),
    ]


def has_closure(args: Iterable[Any], kwargs: Mapping[str, Any]) -> bool:
    """Say whether a step was called with a closure: its forward and backward are still to come."""
    # Hooks get the optimizer itself as the first of `args`.
    return any(callable(value) and not isinstance(value, Optimizer) for value in (*args, *kwargs.values()))


def remove_all(handles: list[RemovableHandle]) -> None:
    """Remove hooks and empty the list.

    Torch keeps a mark of a process-wide hook that takes keyword arguments when the hook itself is gone, and would
    believe in global hooks for ever.
    """
    marks = getattr(torch_module, "_global_forward_hooks_with_kwargs", {})
    for handle in handles:
        handle.remove()
        marks.pop(handle.id, None)
    handles.clear()
