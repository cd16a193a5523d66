"""Leave everything as it was: weights, buffers, gradients, modes, counters and random numbers, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from sonde.forensics.keeper import RandomState

_PLAIN: Final = (bool, int, float, str, type(None))


class Kept:
    """The state of modules at one moment; `put` brings it back. Optimizers are never touched by a checkup."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = [each for module in modules for each in module.modules()]
        tensors = {id(each): each for module in modules for each in [*module.parameters(), *module.buffers()]}
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]
        self._gradients = [(tensor, tensor.grad) for tensor in tensors.values() if tensor.is_leaf]
        self._copies = [(grad, grad.detach().clone()) for _, grad in self._gradients if grad is not None]
        self._buffers = [(module, dict(module._buffers)) for module in self._modules]
        self._plain = [(module, _plain_attributes(module)) for module in self._modules]
        self._random = RandomState.now(_device_of(modules))

    @torch.no_grad()
    def put(self) -> None:
        """Bring the state back."""
        for module, buffers in self._buffers:
            module._buffers.clear()
            module._buffers.update(buffers)
        for module, values in self._plain:
            for name in _plain_attributes(module).keys() - values.keys():
                delattr(module, name)
            for name, value in values.items():
                module.__dict__[name] = value
        for tensor, value in self._tensors:
            tensor.data.copy_(value)
        for tensor, grad in self._gradients:
            tensor.grad = grad
        for grad, value in self._copies:
            grad.data.copy_(value)
        self._random.put()

    def fresh(self) -> None:
        """Bring the state back, without any gradients: the start of a probe."""
        self.put()
        for tensor, _ in self._gradients:
            tensor.grad = None


@contextmanager
def kept(modules: list[nn.Module], loader: Any) -> Iterator[Kept]:
    """Keep the state of modules and of a loader's generator, and bring it back at the end whatever happens."""
    state = Kept(modules)
    generators = [(each, each.get_state()) for each in _generators(loader)]
    try:
        yield state
    finally:
        state.put()
        for generator, value in generators:
            generator.set_state(value)


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if isinstance(value, _PLAIN)}


def _generators(loader: Any) -> list[torch.Generator]:
    sampler = getattr(loader, "sampler", None)
    found = {id(each): each for each in (getattr(loader, "generator", None), getattr(sampler, "generator", None))}
    return [each for each in found.values() if isinstance(each, torch.Generator)]


def _device_of(modules: list[nn.Module]) -> torch.device | None:
    tensors: Iterator[Tensor] = (each for module in modules for each in module.parameters())
    return next((each.device for each in tensors), None)
