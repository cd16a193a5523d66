"""Watch a gradient scaler: its scale at every step, and the steps it holds back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from sonde.guard import Guard
from sonde.signals import Recorder
from sonde.taps.optimizers import OptimizerTap


class ScalerTap:
    """Stands in for `scaler.step` on this one scaler while attached.

    A scaler that finds an infinity does not call the optimizer at all, and torch has no hook for it; so this is the one
    place where a method of a user's object is wrapped. The call itself goes through unchanged.
    """

    def __init__(
        self,
        scaler: Any,
        optimizers: OptimizerTap,
        recorder: Recorder,
        guard: Guard,
        *,
        before_step: Callable[[], None],
        after_skip: Callable[[], None],
    ) -> None:
        self._scaler = scaler
        self._optimizers = optimizers
        self._recorder = recorder
        self._before_step = before_step
        self._after_skip = after_skip
        self._see_scale = guard.wrap("gradient scaler", self._scale)
        self._see_skip = guard.wrap("gradient scaler", self._skip)
        self.site = -1

    def attach(self) -> None:
        """Begin to listen."""
        original = self._scaler.step

        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._see_scale()
            before = self._optimizers.stepped
            result = original(optimizer, *args, **kwargs)
            if self._optimizers.stepped == before:
                self._see_skip(optimizer)
            return result

        # An attribute of the instance hides the method of the class; deleting it restores the object as it was.
        self._scaler.step = step

    def remove(self) -> None:
        """Stop listening."""
        vars(self._scaler).pop("step", None)

    def _scale(self) -> None:
        self._before_step()
        scale = getattr(self._scaler, "_scale", None)
        if isinstance(scale, Tensor):
            if self.site < 0:
                self.site = self._recorder.site("scaler.scale", "scalar")
            self._recorder.see(self.site, scale)

    def _skip(self, optimizer: Optimizer) -> None:
        self._optimizers.see_skipped(optimizer)
        self._after_skip()
