"""Call something just before and just after an optimizer of the watched models writes, outside any guard.

`OptimizerTap` measures; this is for those who act. What `before` raises reaches the user, and the step does not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from sonde.handles import around_steps, has_closure, remove_all
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
        self._handles = around_steps(self._begin, self._end)

    def remove(self) -> None:
        """Stop listening and forget the parameters."""
        remove_all(self._handles)
        self._parameters.clear()

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not has_closure(args, kwargs) and self._is_ours(optimizer):
            self._before(optimizer)

    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_ours(optimizer):
            self._after(optimizer)

    def _is_ours(self, optimizer: Optimizer) -> bool:
        if is_capturing():
            return False
        ours = self._parameters
        return any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])
