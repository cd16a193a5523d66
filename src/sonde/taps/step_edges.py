"""Call something just before and just after an optimizer of the watched models writes, outside any guard.

`OptimizerTap` measures; this is for those who act. What `before` raises reaches the user, and the step does not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from sonde.handles import remove_all
from sonde.signals import is_capturing

OnStep = Callable[[Optimizer], None]


class StepEdges:
    """Tells of the steps of optimizers that own a parameter of these models. Attach it after `OptimizerTap`."""

    def __init__(self, models: Iterable[nn.Module], before: OnStep, after: OnStep) -> None:
        self._parameters = {id(parameter) for model in models for parameter in model.parameters()}
        self._before = before
        self._after = after
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Begin to listen."""

        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            # With a closure the gradients of this step are still to come.
            if not torch.compiler.is_compiling() and not _has_closure(args, kwargs) and self._is_ours(optimizer):
                self._before(optimizer)

        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if not torch.compiler.is_compiling() and self._is_ours(optimizer):
                self._after(optimizer)

        self._handles = [register_optimizer_step_pre_hook(before_step), register_optimizer_step_post_hook(after_step)]

    def remove(self) -> None:
        """Stop listening and forget the parameters."""
        remove_all(self._handles)
        self._parameters.clear()

    def _is_ours(self, optimizer: Optimizer) -> bool:
        if is_capturing():
            return False
        ours = self._parameters
        return any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # Hooks get the optimizer itself as the first of `args`.
    return any(callable(value) and not isinstance(value, Optimizer) for value in (*args, *kwargs.values()))
