"""One batch as a program would use it, and a guard that restores everything a checkup changes, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from sonde.errors import OptionError
from sonde.forensics.keeper import RandomState

# --------------------------------------------------------------------------------
# One batch as a program would use it: what the model is called with, and what the loss compares with.


_TARGETS: Final = ("target", "targets", "label", "labels", "y")


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The model's arguments, by position or by name, and the target."""

    arguments: tuple[Any, ...]
    named: dict[str, Any]
    target: Any

    def output(self, model: nn.Module) -> Any:
        """Call the model."""
        return model(*self.arguments, **self.named)

    @property
    def size(self) -> int:
        """How many samples it has: the first dimension of the first tensor."""
        return next((len(each) for each in self.tensors() if each.dim()), 0)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the model is called with."""
        return [each for each in (*self.arguments, *self.named.values()) if isinstance(each, Tensor)]

    def first(self, count: int) -> Batch:
        """Return a batch of the first samples only."""
        return self.change(lambda each: each[:count], target=True)

    def tiled(self) -> Batch:
        """Return a batch with every sample twice."""
        return self.change(lambda each: torch.cat([each, each]), target=True)

    def change(self, function: Any, *, target: bool = False) -> Batch:
        """Return a batch with a function applied to every tensor that has samples, and to the target if asked."""
        size = self.size

        def apply(value: Any) -> Any:
            return function(value) if isinstance(value, Tensor) and value.dim() and len(value) == size else value

        return replace(
            self,
            arguments=tuple(apply(each) for each in self.arguments),
            named={name: apply(each) for name, each in self.named.items()},
            target=apply(self.target) if target else self.target,
        )


def take(loader: Any, count: int, device: torch.device | None) -> list[Batch]:
    """Return the first batches of a loader.

    Raises:
        OptionError: It is an iterator, which would be used up, or a batch has no form that is known here.

    """
    if iter(loader) is loader:
        raise OptionError("checkup() takes a loader that can be gone through again; got an iterator.")
    batches = []
    for raw in loader:
        batches.append(_read(raw, device))
        if len(batches) == count:
            break
    if not batches:
        raise OptionError("checkup() got a loader without any batch.")
    return batches


def _read(raw: Any, device: torch.device | None) -> Batch:
    def move(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) and device is not None else value

    if isinstance(raw, Mapping):
        name = next((name for name in _TARGETS if name in raw), None)
        if name is not None:
            named = {key: move(value) for key, value in raw.items() if key != name}
            return Batch((), named, move(raw[name]))
    elif isinstance(raw, tuple | list) and len(raw) >= 2:
        *inputs, target = raw
        return Batch(tuple(move(each) for each in inputs), {}, move(target))
    raise OptionError(
        f"checkup() takes batches of the form (inputs, target) or a dict with one of {', '.join(_TARGETS)}; "
        f"got {type(raw).__name__}."
    )


# --------------------------------------------------------------------------------
# Leave everything as it was: weights, buffers, gradients, modes, counters and random numbers, bit for bit.


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
