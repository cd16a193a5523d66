"""Watch gradient scalers: their scale at every step, and the steps they skip."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from sonde.hooks.guard import Guard, Handle, remove_all
from sonde.hooks.replace_function import SCALED_STEP, ReplacedFunction
from sonde.record.kinds import scale_of
from sonde.record.optimizers import OptimizerTap
from sonde.stats.protocol import Recorder


class ScalerTap:
    """Listens to the steps of whichever gradient scaler steps the watched parameters, such as one inside a framework.

    A scaler that finds an infinity does not call the optimizer, and torch has no hook for that; so `GradScaler.step` is
    replaced while attached. Of a scaler that was given and is not torch's, its own `step` is.
    """

    def __init__(
        self,
        given: Any,
        optimizers: OptimizerTap,
        recorder: Recorder,
        guard: Guard,
    ) -> None:
        self.site = -1
        """The site of the scale, once a scaler has stepped."""
        self._given = given
        self._found: Callable[[], Any] = lambda: None
        self._optimizers = optimizers
        self._recorder = recorder
        self._see_scale = guard.wrap("gradient scaler", self._scale)
        self._see_skip = guard.wrap("gradient scaler", self._skip)
        is_foreign = given is not None and getattr(type(given), "step", None) is not torch.amp.GradScaler.step
        self._steps = [SCALED_STEP, ReplacedFunction(given, "step")] if is_foreign else [SCALED_STEP]
        self._steps_before: int | None = None
        self._handles: list[Handle] = []

    @property
    def scaler(self) -> Any:
        """The scaler that was given, else the one that stepped last; None if there is none."""
        return self._given if self._given is not None else self._found()

    def attach(self) -> None:
        """Begin to listen."""
        self._handles += [each.listen(before=self._see_scale, after=self._see_skip) for each in self._steps]

    def remove(self) -> None:
        """Stop listening."""
        remove_all(self._handles)

    def _scale(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        scaler, optimizer = self._parts(args, kwargs)
        self._steps_before = None
        if scaler is not self._given:
            if not self._optimizers.owns(optimizer):
                return
            self._found = weakref.ref(scaler)
        self._steps_before = self._optimizers.stepped
        self._optimizers.open_scaled(optimizer)
        scale = scale_of(scaler)
        if scale is not None:
            if self.site < 0:
                self.site = self._recorder.site("scaler.scale", "scalar")
            self._recorder.see(self.site, scale)

    def _skip(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if self._optimizers.stepped == self._steps_before:
            self._optimizers.see_skipped(self._parts(args, kwargs)[1])

    def _parts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the scaler and the optimizer; a method of the given object is called without the former."""
        both = (*args, kwargs["optimizer"]) if "optimizer" in kwargs else args
        return (both[0], both[1]) if isinstance(both[0], torch.amp.GradScaler) else (self._given, both[0])
