"""Sensors for trainings with several ranks: which passes are reduced, and buffers that should be equal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sonde.core.signals import BUFFER, DIRECT_PASSES, LOOP, REDUCED_PASSES, WEIGHT_BEFORE, part_of
from sonde.hooks.guard import Handle
from sonde.hooks.names import plain_name, unwrap
from sonde.hooks.on_call import on_module
from sonde.parallel.placements import Holding
from sonde.parallel.ranks import num_ranks
from sonde.record.kinds import is_compiled
from sonde.record.modules import WatchedModule
from sonde.records import Phase
from sonde.schedule import every, first
from sonde.sensors.modes import has_modes
from sonde.sensors.sensor import Context, Sensor, StepEnd

MAX_BUFFER_ELEMENTS: Final = 1 << 20
_COPY: Final = Holding("replica")


class Reductions(Sensor):
    """Training passes that DistributedDataParallel reduces the gradients of, and passes around it. Every step."""

    produces = (REDUCED_PASSES, DIRECT_PASSES)
    cost = "two numbers per step"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._reduced = self._wrapped = self._inner = 0

    def start(self) -> None:
        """Do nothing more without a wrapper."""
        if not any(isinstance(model, DistributedDataParallel) for model in self.context.watched.models.values()):
            self.finish()

    def looks_at(self, entry: WatchedModule) -> bool:
        """Return whether a module is a wrapper, or the model inside one."""
        models = self.context.watched.models.values()
        wrapped = {id(model.module) for model in models if isinstance(model, DistributedDataParallel)}
        return isinstance(entry.module, DistributedDataParallel) or id(entry.module) in wrapped

    def on_call(self, entry: WatchedModule, call: int, phase: Phase, args: tuple[Any, ...], output: Any) -> None:
        """Count a pass."""
        if phase != "train":
            return
        if isinstance(entry.module, DistributedDataParallel):
            self._wrapped += 1
            self._reduced += bool(entry.module.require_backward_grad_sync)
        else:
            self._inner += 1

    def on_forgotten(self) -> None:
        """Count anew."""
        self._reduced = self._wrapped = self._inner = 0

    def on_step_end(self, end: StepEnd) -> None:
        """Write the counts."""
        if end.due and (self._wrapped or self._inner):
            self.signals.put(LOOP, REDUCED_PASSES, self._reduced)
            self.signals.put(LOOP, DIRECT_PASSES, max(0, self._inner - self._wrapped))
        self._reduced = self._wrapped = self._inner = 0


class Buffers(Sensor):
    """Buffers that training writes to, as the running statistics of batch norms. Counts steps.

    They are read where the model begins its first pass of a step: that is after DistributedDataParallel has copied
    those of rank 0.
    """

    produces: ClassVar[tuple[str, ...]] = (BUFFER,)
    when = first(4) | every(10)
    cost = "one pass over buffers of at most a million elements, in a training with several ranks"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._buffers: list[tuple[str, Tensor, int]] = []
        """Name, tensor, and the version of it that nothing has written to; -1 where every version counts."""
        self._sites: dict[str, int] = {}
        self._is_new = True

    def start(self) -> None:
        """Find the buffers."""
        if num_ranks() > 1:
            for prefix, model in self.context.watched.models.items():
                before = f"{prefix}." if prefix else ""
                inner = unwrap(model)
                # Torch does not count that a batch norm writes to its running statistics.
                always = {id(each) for norm in inner.modules() if has_modes(norm) for each in norm.buffers()}
                self._buffers += [
                    (before + plain_name(name), buffer, -1 if id(buffer) in always else buffer._version)
                    for name, buffer in inner.named_buffers()
                    if buffer.is_floating_point() and buffer.numel() <= MAX_BUFFER_ELEMENTS
                ]
        if not self._buffers:
            self.finish()

    def listen(self) -> Iterator[Handle]:
        """Listen to the models themselves, inside of their wrappers and outside of compiled code."""
        for model in self.context.watched.models.values() if self._buffers else ():
            inner = unwrap(model, also_compiled=False)
            if not is_compiled(inner):
                yield from on_module(inner, before=self.context.watched.guard.wrap("buffers", self._see))

    def _see(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._is_new or not torch.is_grad_enabled() or not self.context.watched.is_due("train"):
            return
        self._is_new = False
        if not self.when(self.context.steps):
            return
        recorder = self.signals.recorder
        for name, buffer, version in self._buffers:
            if buffer._version != version:
                if name not in self._sites:
                    self._sites[name] = recorder.site(
                        name, "vital", part=part_of(self.produces[0]), tensor=buffer, held=_COPY
                    )
                recorder.see(self._sites[name], buffer)

    def on_step_end(self, end: StepEnd) -> None:
        """Look again in the next step."""
        self._is_new = True


class WeightsBefore(Buffers):
    """The smallest trained parameter before each step: ranks may differ, and be averaged by the program."""

    produces = (WEIGHT_BEFORE,)
    when = every(1)
    cost = "one pass over the smallest parameter, in a training with several ranks"

    def start(self) -> None:
        """Find it; a part of a sharded parameter is no copy."""
        trained = [(name, each) for name, each in self.context.module_parameters() if each.requires_grad]
        plain = [(name, each) for name, each in trained if type(each) is nn.Parameter and each.numel() > 1]
        if num_ranks() > 1 and plain:
            name, smallest = min(plain, key=lambda found: found[1].numel())
            self._buffers = [(name, smallest, -1)]
        else:
            self.finish()
