"""Find a model that is trained without a torch optimizer: its weights change after a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sonde.hooks.guard import Guard, Handle, backward_id, is_capturing, remove_all
from sonde.hooks.on_backward import after_backward
from sonde.hooks.replace_function import MODULE_CALL
from sonde.record.unseen_steps import WeightsThen


class UpdatesByHand:
    """Listens to backward passes and to the calls that follow them, until weights have changed in between.

    A program that only computes gradients, such as a saliency map, changes no weights and is not taken for a training.

    Args:
        guard: What isolates faults.
        find: Returns the parameters that have a gradient and may be trained by hand; None to stop looking.
        on_change: Takes the module that is called next, before the call, and the ids of these parameters.

    """

    def __init__(
        self,
        guard: Guard,
        find: Callable[[], list[nn.Parameter] | None],
        on_change: Callable[[nn.Module, set[int]], None],
    ) -> None:
        self._find = find
        self._on_change = on_change
        self._see_backward = guard.wrap("finding models", self._after_backward)
        self._see_call = guard.wrap("finding models", self._before_call)
        self._passes = 0
        self._parameters: set[int] = set()
        self._then: WeightsThen | None = None
        self._has_changed = False
        self._backwards: list[Handle] = []
        self._calls: list[Handle] = []

    def listen(self) -> None:
        """Begin to listen."""
        self._backwards = [after_backward(self._see_backward)]

    def remove(self) -> None:
        """Stop listening and forget the parameters; doing so twice is fine."""
        remove_all(self._backwards)
        remove_all(self._calls)
        self._then = None

    def _after_backward(self) -> None:
        if backward_id() != -1:
            return  # inside another backward pass
        self._passes += 1
        # Looking for parameters takes long: it is repeated ever more rarely, for models that are made later.
        if self._passes & (self._passes - 1) == 0:
            self._look()
        if self._then is not None and not self._calls:
            self._calls = [MODULE_CALL.listen(before=self._see_call)]

    def _look(self) -> None:
        found = self._find()
        if found is None:
            self.remove()
        elif found:
            self._parameters = set(map(id, found))
            self._then = WeightsThen(found)
            self._then.remember()

    def _before_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._then is None or not torch.is_grad_enabled() or backward_id() != -1 or is_capturing():
            return
        self._has_changed = self._has_changed or self._then.differ()
        if not self._has_changed:
            remove_all(self._calls)  # until the next backward pass
        elif not self._parameters.isdisjoint(map(id, args[0].parameters())):
            self.remove()
            self._on_change(args[0], self._parameters)
