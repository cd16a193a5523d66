"""Watch a gradient scaler: its scale at every step, and the steps it holds back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sonde.hooks.guard import Guard, Handle, remove_all
from sonde.hooks.replace_function import ReplacedFunction
from sonde.record.kinds import scale_of
from sonde.record.optimizers import OptimizerTap
from sonde.stats.protocol import Recorder


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
        self._step = ReplacedFunction(scaler, "step")
        self._steps_before = 0
        self._handles: list[Handle] = []
        self.site = -1

    def attach(self) -> None:
        """Begin to listen."""
        self._handles.append(self._step.listen(before=self._see_scale, after=self._see_skip))

    def remove(self) -> None:
        """Stop listening."""
        remove_all(self._handles)

    def _scale(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._steps_before = self._optimizers.stepped
        self._before_step()
        scale = scale_of(self._scaler)
        if scale is not None:
            if self.site < 0:
                self.site = self._recorder.site("scaler.scale", "scalar")
            self._recorder.see(self.site, scale)

    def _skip(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if self._optimizers.stepped == self._steps_before:
            self._optimizers.see_skipped(args[0] if args else kwargs["optimizer"])
            self._after_skip()
