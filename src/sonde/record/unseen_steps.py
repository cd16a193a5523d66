"""Find the iterations of a loop in which no torch optimizer steps: the weights change between two training passes.

This serves updates written by hand, optimizers that are not torch's, and steps that are compiled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from sonde.hooks.guard import Guard, Handle, backward_id, remove_all
from sonde.hooks.on_backward import Reach, after_backward
from sonde.record.kinds import Given
from sonde.record.modules import ModuleTap
from sonde.record.optimizers import OptimizerTap
from sonde.record.packer import Packer
from sonde.record.parameters import WatchedParameter

logger = logging.getLogger("sonde")

MAX_TRACED: Final = 32
_MAX_COPIED: Final = 2
_MAX_ELEMENTS: Final = 4096


class WeightsThen:
    """Remembers weights; `differ` returns whether they have changed since.

    Torch counts writes to a parameter, except through `p.data`. So a few small ones on the CPU are compared too.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        parameters = [each for each in parameters if not each.is_inference()]  # whose writes are not counted
        self._traced = parameters[:: max(1, len(parameters) // MAX_TRACED)]
        small = [each for each in parameters if type(each) is nn.Parameter and each.is_cpu and each.numel()]
        small = sorted((each for each in small if each.numel() <= _MAX_ELEMENTS), key=Tensor.numel)
        self._compared = small[-_MAX_COPIED:]
        self._versions: list[int] = []
        self._copies: list[Tensor] = []

    def remember(self) -> None:
        """Remember the present weights."""
        self._versions = [each._version for each in self._traced]
        self._copies = [each.detach().clone() for each in self._compared]

    def differ(self) -> bool:
        """Return whether the weights have changed since `remember`; True before the first call of it."""
        if len(self._versions) != len(self._traced):
            return True
        if any(each._version != version for each, version in zip(self._traced, self._versions, strict=True)):
            return True
        # A NaN differs from itself, and so would look like a change.
        return any(
            not torch.equal(each.detach().nan_to_num(), copy.nan_to_num())
            for each, copy in zip(self._compared, self._copies, strict=True)
        )


class WeightChanges:
    """Detects whether the weights have changed since a backward pass."""

    def __init__(self, entries: Iterable[WatchedParameter], reach: Reach) -> None:
        self._then = WeightsThen([e.parameter for e in entries if e.parameter.requires_grad and e.is_ready()])
        self._reach = reach
        self._passes = 0
        self.backwards = 1
        """How many backward passes the last iteration had."""

    @property
    def passes(self) -> int:
        """How many backward passes the present iteration has had."""
        self._reach.settle()
        return self._reach.passes - self._passes

    def have_come(self) -> bool:
        """Return whether the weights have changed since the last iteration, after a backward pass of this one."""
        passes = self.passes
        if passes and not self._then.differ():
            return False
        if passes:
            self.backwards = passes
        self._passes += passes
        self._then.remember()
        return bool(passes)


class UnseenSteps:
    """Ends an iteration where the weights have changed though no torch optimizer has stepped.

    Args:
        given: What was passed in: optimizers, and objects whose steps cannot be seen.
        optimizers: The tap on optimizers.
        modules: The tap on modules.
        packer: Takes events.
        is_due: Returns whether a step is recorded.
        end_step: Ends the present iteration.

    """

    def __init__(
        self,
        given: Given,
        optimizers: OptimizerTap,
        modules: ModuleTap,
        packer: Packer,
        is_due: Callable[[int], bool],
        end_step: Callable[[], None],
    ) -> None:
        self._optimizers, self._modules, self._packer = optimizers, modules, packer
        self._is_due, self._end_step = is_due, end_step
        self._opaque = [type(each).__name__ for each in given.opaque]
        self._patience = 1 if given.optimizers else 0  # an optimizer that was passed in should have stepped
        self._changes: WeightChanges | None = None
        self._handles: list[Handle] = []
        self._found = 0
        self._has_gradients = False

    @property
    def is_looking(self) -> bool:
        """Whether an optimizer step may still go unseen."""
        return self._changes is not None

    def attach(self, changes: WeightChanges, guard: Guard) -> None:
        """Start listening."""
        self._changes = changes
        self._handles.append(after_backward(guard.wrap("after backward passes", self._after_backward)))

    def remove(self) -> None:
        """Stop listening and forget the models."""
        self._changes = None
        remove_all(self._handles)

    def look(self) -> None:
        """End the iteration if the weights have changed though no torch optimizer has stepped."""
        if self._changes is None:
            return
        if self._optimizers.stepped or self._optimizers.rhythm.by_hand:
            self.remove()
        elif not self._optimizers.is_stepping and self._changes.have_come():
            if self._patience > 0:
                self._patience -= 1
                return
            self._found += 1
            # The first may be a part of an iteration whose optimizer steps later: SAM changes the weights before.
            if self._found == 2:
                self._report()
            if self._found >= 2 and self._is_due(self._packer.step):
                if not self._has_gradients:
                    self._optimizers.see_own_gradients()
                self._optimizers.see_own_updates()
            self._has_gradients = False
            self._end_step()

    def take_back(self) -> None:
        """Continue the iteration that a single change of the weights has ended, now that an optimizer steps."""
        if self._found == 1 and not self._optimizers.stepped:
            self._found = 0
            self._packer.reopen()

    def _after_backward(self) -> None:
        if self._changes is None or backward_id() != -1:
            return
        self._modules.wake()  # the next pass may show that an iteration is over
        is_last = self._changes.passes == self._changes.backwards
        if self._found >= 2 and self._is_due(self._packer.step) and is_last:
            self._has_gradients = True
            self._optimizers.see_own_gradients()

    def _report(self) -> None:
        what = f"the steps of {', '.join(self._opaque)} cannot be seen" if self._opaque else "no torch optimizer steps"
        message = (
            f"{what}: a step is counted where the weights have changed after a backward pass, and what needs the "
            "optimizer itself is not judged. Call session.step() after each update to count exactly."
        )
        self._packer.put_event("steps_unseen", message, {"optimizers": self._opaque})
        if self._opaque:
            logger.warning("%s", message)
