"""Sensors for modes: which modules that behave differently in training run in which mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.nn.functional as functional
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from sonde.core.signals import DROPPED, LOOP, TRAINING
from sonde.hooks.guard import Handle, is_capturing
from sonde.hooks.replace_function import OverridableFunction
from sonde.record.modules import WatchedModule
from sonde.records import Phase
from sonde.schedule import first
from sonde.sensors.sensor import Context, Sensor

_DROPOUTS: Final = [OverridableFunction(functional, f"dropout{dims}") for dims in ("", "1d", "2d", "3d")]
_ARGUMENTS: Final = ("input", "p", "training", "inplace")
_ATTENTION: Final = OverridableFunction(functional, "scaled_dot_product_attention")
_DROPS_AT: Final = 4
"""The place of `dropout_p` among its arguments."""


def has_modes(module: nn.Module) -> bool:
    """Return whether a module does something else in evaluation mode."""
    return isinstance(module, _NormBase | _DropoutNd)


class Modes(Sensor):
    """The mode of models, batch norms and dropouts: in the first steps, then whenever it has changed. Counts steps."""

    produces = (TRAINING,)
    when = first(4)
    cost = "one number per module"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._last: dict[tuple[int, Phase], bool] = {}

    def looks_at(self, entry: WatchedModule) -> bool:
        """Return whether the mode of a module matters."""
        return entry.is_root or has_modes(entry.module)

    def on_call(self, entry: WatchedModule, call: int, phase: Phase, args: tuple[Any, ...], output: Any) -> None:
        """Note the mode that a module ran in."""
        key, training = (entry.key, phase), entry.module.training
        is_early = self.when(self.context.watched.packer.step)
        if is_early or self._last.get(key) is not training:
            self._last[key] = training
            self.signals.put(entry.name, TRAINING, training, phase=phase)
        if not is_early and phase == "train" and not entry.is_root:
            self.context.leave_out(entry.key, training)


class Dropping(Sensor):
    """Functions of torch that drop values while gradients are off, whatever the mode of the modules."""

    produces = (DROPPED,)
    cost = "a test of the arguments at each call of these functions"

    def listen(self) -> Iterator[Handle]:
        """Listen to the functions."""
        wrap = self.context.watched.guard.wrap
        for each in _DROPOUTS:
            yield each.listen(after=wrap("dropout", self._see), during="awake")
        yield _ATTENTION.listen(after=wrap("dropout", self._see_attention), during="awake")

    def _see(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        # The modules of torch hand over all four arguments by place; their mode is seen where they are called.
        if torch.is_grad_enabled() or len(args) == len(_ARGUMENTS) or is_capturing():
            return
        given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        if given.get("training", True) is True and given.get("p", 0.5) > 0:
            self._note()

    def _see_attention(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        share = args[_DROPS_AT] if len(args) > _DROPS_AT else kwargs.get("dropout_p", 0.0)
        if not torch.is_grad_enabled() and not is_capturing() and share > 0:
            self._note()

    def _note(self) -> None:
        if self.context.watched.is_due("eval"):
            self.signals.put(LOOP, DROPPED, 1.0, phase="eval")
