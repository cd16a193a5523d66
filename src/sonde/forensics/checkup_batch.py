"""One batch as a program would use it: what the model is called with, and what the loss compares with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from sonde.errors import OptionError

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
