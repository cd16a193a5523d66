"""Sensors for activations: units that ever were active, saturated squashing functions, sharp attention."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from sonde.core.signals import ATTENTION_ENTROPY, EVER_ACTIVE, SATURATED, UNIT_SAMPLES
from sonde.hooks.autograd_graph import is_softmax
from sonde.record.modules import WatchedModule
from sonde.records import Phase
from sonde.schedule import every, first
from sonde.sensors.sensor import Context, Sensor, StepEnd
from sonde.sensors.tensors import is_real

MAX_CALLS: Final = 4
MAX_VALUES: Final = 4096
BEYOND: Final = 5.0
# Enough of a batch to show how sharp attention is.
_ATTENTION_SAMPLES: Final = 4
_CHANNELS_FIRST: Final = ("Conv", "BatchNorm", "InstanceNorm", "GroupNorm", "MaxPool", "AvgPool")


def is_rectifier(module: nn.Module) -> bool:
    """Return whether a module cuts off below zero, so that a unit may be dead."""
    return isinstance(module, nn.ReLU | nn.ReLU6)


def is_squashing(module: nn.Module) -> bool:
    """Return whether a module flattens out on both sides."""
    return isinstance(module, nn.Sigmoid | nn.Tanh | nn.Hardtanh) and not isinstance(module, nn.ReLU6)


def is_attention(module: nn.Module) -> bool:
    """Return whether a module may return attention weights."""
    return "Attention" in type(module).__name__


@dataclass(slots=True, eq=False)
class _Units:
    """What is known of the units of one call of a rectifier."""

    name: str
    call: int
    active: Tensor | None = None
    samples: int = 0
    unwritten: bool = field(default=False)


class Units(Sensor):
    """Looks at rectifiers, squashing functions and attention in training. Counts recorded steps, from 1."""

    produces = (EVER_ACTIVE, UNIT_SAMPLES, SATURATED, ATTENTION_ENTROPY)
    when = first(21) | every(10)
    samples_steps = True
    cost = "one pass over the outputs of rectifiers, a sample of those of squashing functions and attention"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._units: dict[tuple[int, int], _Units] = {}

    def looks_at(self, entry: WatchedModule) -> bool:
        """Return whether the outputs of a module are looked at unit by unit."""
        module = entry.module
        return not entry.is_root and (is_rectifier(module) or is_squashing(module) or is_attention(module))

    @torch.no_grad()
    def on_call(self, entry: WatchedModule, call: int, phase: Phase, args: tuple[Any, ...], output: Any) -> None:
        """Measure the arguments and the output of a module."""
        if phase != "train":
            return
        module, call = entry.module, min(call, MAX_CALLS - 1)
        units = self._units.get((entry.key, call))
        if units is None:
            units = self._units[entry.key, call] = _Units(entry.name, call)
        if is_rectifier(module):
            self._see_units(units, output, self.context.producers.get(entry.name, ""))
        elif is_squashing(module):
            self._see_saturation(module, units, args, output)
        else:
            self._see_attention(units, output)

    def on_step_end(self, end: StepEnd) -> None:
        """Write what was found in this step."""
        for units in self._units.values() if end.due else ():
            if units.unwritten and units.active is not None:
                units.unwritten = False
                self.signals.see(units.name, EVER_ACTIVE, units.active, call=units.call)
                self.signals.put(units.name, UNIT_SAMPLES, units.samples, call=units.call)

    def _see_units(self, units: _Units, output: Any, producer: str) -> None:
        if not is_real(output) or output.dim() < 2 or not output.numel():
            return
        dim = _unit_dim(output, producer)
        active = output.detach().amax([axis for axis in range(output.dim()) if axis != dim]) > 0
        before = units.active
        if before is None or before.shape != active.shape or before.device != active.device:
            units.active, units.samples = active, 0
        else:
            units.active = before | active
        units.samples += output.numel() // len(active)
        units.unwritten = True

    def _see_saturation(self, module: nn.Module, units: _Units, args: tuple[Any, ...], output: Any) -> None:
        limits = isinstance(module, nn.Hardtanh)
        values = output if limits else (args[0] if args else None)
        if not isinstance(values, Tensor) or not is_real(values) or not values.numel():
            return
        flat = values.detach().flatten()
        flat = flat[:: -(-len(flat) // MAX_VALUES)].float()
        if isinstance(module, nn.Hardtanh):
            beyond = (flat >= module.max_val) | (flat <= module.min_val)
        else:
            beyond = flat.abs() > BEYOND
        self.signals.see(units.name, SATURATED, beyond, call=units.call)

    def _see_attention(self, units: _Units, output: Any) -> None:
        # Others return a bias of the same shape there (T5), so the weights are known by the softmax that made them.
        others = output[1:] if isinstance(output, tuple | list) else ()
        found = (each for each in others if isinstance(each, Tensor) and is_real(each) and is_softmax(each))
        weights = next(found, None)
        if weights is None or weights.dim() != 4 or weights.shape[-1] < 2:
            return
        some = weights.detach()[:_ATTENTION_SAMPLES].float()
        entropy = -torch.special.xlogy(some, some).sum(-1).mean((0, 2)) / math.log(weights.shape[-1])
        self.signals.see(units.name, ATTENTION_ENTROPY, entropy, call=units.call)


def _unit_dim(output: Tensor, producer: str) -> int:
    """Return the dimension of units: channels come second in images and what convolutions made, else last."""
    if output.dim() > 2 and producer.startswith(_CHANNELS_FIRST):
        return 1
    if output.dim() > 3 and not producer.startswith(("Linear", "LayerNorm")):
        return 1
    return output.dim() - 1
