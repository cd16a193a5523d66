"""Rebuild an optimizer from its description on a tape, without its class being imported from the user's program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from sonde.core.tape import OptimizerInfo, Tape, number, references
from sonde.forensics.experiments.kernels import CannotRepeat
from sonde.forensics.experiments.program import Program, World

_OF_DEVICE: Final = frozenset({"foreach", "fused", "capturable", "differentiable", "initial_lr"})
"""Settings that concern the device or a scheduler, not the update."""


INSTEAD_OF_ZERO: Final = 1e-4
"""The learning rate that factors apply to where the program's own is zero."""


class Rebuilt:
    """The optimizers of a taped step, made anew over the parameters of a world."""

    def __init__(self, program: Program, world: World, **settings: float | None) -> None:
        """Make the optimizers.

        Args:
            program: The taped step.
            world: Whose parameters they update.
            settings: Numbers to set in all groups that have them; `lr_factor` multiplies learning rates.

        Raises:
            CannotRepeat: No optimizer is one of torch's.

        """
        infos = program.tape.optimizers
        if not infos:
            raise CannotRepeat("the taped step has no optimizer that could be made again")
        self.optimizers = [_make(info, program, world, settings) for info in infos]
        self._clips = [] if settings.get("clip") == 0 else clips(program.tape)
        self._world = world

    def step(self) -> None:
        """Clip as the program does, and update the parameters."""
        for kind, limit in self._clips:
            gradients = [each for each in self._world.trained() if each.grad is not None]
            if kind == "value":
                torch.nn.utils.clip_grad_value_(gradients, limit)
            else:
                torch.nn.utils.clip_grad_norm_(gradients, limit)
        for optimizer in self.optimizers:
            optimizer.step()


def clips(tape: Tape) -> list[tuple[str, float]]:
    """Return how the program clips its gradients before it steps: by norm or by value, and the limit."""
    found = []
    last = max((mark.index for mark in tape.marks if mark.kind == "optimizer_enter"), default=-1)
    for mark in tape.marks:
        limit = number(mark.data.get("max_norm"))
        if mark.kind == "clip" and mark.index <= last and isinstance(limit, int | float):
            found.append(("value" if "value" in str(mark.data.get("kind", "")) else "norm", float(limit)))
    return found


def class_of(info: OptimizerInfo) -> Callable[..., Optimizer]:
    """Return the class of torch's with the name of an optimizer.

    Raises:
        CannotRepeat: It is not one of torch's.

    """
    module, _, name = info.kind.rpartition(".")
    found = getattr(torch.optim, name, None)
    if not module.startswith("torch.optim") or not isinstance(found, type) or not issubclass(found, Optimizer):
        raise CannotRepeat(f"the optimizer {info.kind} is not one of torch's")
    if found is torch.optim.LBFGS:
        raise CannotRepeat("L-BFGS evaluates the loss many times in a step")
    return found


def _make(info: OptimizerInfo, program: Program, world: World, settings: Mapping[str, float | None]) -> Optimizer:
    kind = class_of(info)
    groups = []
    for group in info.groups:
        members = [world.parameters[name] for name in group.names if name in world.parameters]
        plain = {name: _setting(value) for name, value in group.settings.items() if name not in _OF_DEVICE}
        groups.append({"params": members, **_changed(plain, settings)})
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise CannotRepeat(f"no parameter of {info.name} is in the tape")
    try:
        optimizer = kind(groups)
    except (TypeError, ValueError) as error:
        raise CannotRepeat(f"{info.kind} cannot be made again: {error}") from error
    if not settings.get("fresh"):
        _put_state(optimizer, info, program, world)
    return optimizer


def _setting(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_setting(each) for each in value)
    return number(value)


def _changed(plain: dict[str, Any], settings: Mapping[str, float | None]) -> dict[str, Any]:
    factor = settings.get("lr_factor")
    if factor is not None and isinstance(plain.get("lr"), int | float):
        plain["lr"] = (plain["lr"] or INSTEAD_OF_ZERO) * factor
    for name, value in settings.items():
        if name in plain and value is not None:
            plain[name] = value
    return plain


def _put_state(optimizer: Optimizer, info: OptimizerInfo, program: Program, world: World) -> None:
    for name, state in info.state.items():
        parameter = world.parameters.get(name)
        if parameter is None:
            continue
        restored = {key: _state_value(value, program, parameter) for key, value in state.items()}
        if restored and all(value is not None for value in restored.values()):
            optimizer.state[parameter] = restored


def _state_value(value: Any, program: Program, parameter: Tensor) -> Any:
    found = references(value)
    if not found:
        return number(value)
    saved = program.saved(found[0])
    if saved is None:
        return None
    return saved.clone().to(parameter.dtype) if saved.dim() and saved.is_floating_point() else saved.clone()
