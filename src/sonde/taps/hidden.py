"""Modules in a plain list, tuple or dict of a module, and plain tensors with a gradient: torch registers neither.

Their parameters get gradients like any others, but neither `parameters()` nor an optimizer made from it knows of them,
nor do `to(device)` and `state_dict()`. Some keep a module out of sight on purpose, a teacher for instance; that one is
frozen, or held by an optimizer of its own, or written to by somebody, and is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from sonde.facts import HiddenFacts
from sonde.hooks.names import named_modules

MAX_HIDDEN: Final = 64
_MAX_ITEMS: Final = 1000


class HiddenParameters:
    """Finds them once, and says later which of them got a gradient and were never written to."""

    def __init__(self, models: Mapping[str, nn.Module], known: set[int]) -> None:
        seen = set(known)
        self._found: list[tuple[str, Tensor, int]] = []
        for name, parameter in _hidden(models):
            if id(parameter) not in seen and parameter.requires_grad and len(self._found) < MAX_HIDDEN:
                seen.add(id(parameter))
                self._found.append((name, parameter, parameter._version))

    def __bool__(self) -> bool:
        return bool(self._found)

    def judge(self) -> tuple[HiddenFacts, ...]:
        """Return those that have a gradient and still are as they were."""
        return tuple(
            HiddenFacts(
                name=name,
                shape=tuple(parameter.shape),
                reached=True,
                tensor=not isinstance(parameter, nn.Parameter),
            )
            for name, parameter, version in self._found
            if parameter.grad is not None and parameter._version == version
        )


def _hidden(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for name, module, _ in named_modules(dict(models)):
        before = "" if name == "(model)" else f"{name}."
        for key, value in vars(module).items():
            if _is_trained(value):
                yield f"{before}{key}", value
            elif not key.startswith("_"):
                for place, item in _items(value):
                    yield from _parameters(f"{before}{key}.{place}", item)


def _is_trained(value: Any) -> bool:
    """Say whether an attribute is a tensor that somebody meant to be trained: it stores gradients and is no result."""
    return type(value) is Tensor and value.is_leaf and value.requires_grad


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, list | tuple) and len(value) <= _MAX_ITEMS:
        yield from enumerate(value)
    elif isinstance(value, dict) and len(value) <= _MAX_ITEMS:
        yield from value.items()


def _parameters(name: str, item: Any) -> Iterator[tuple[str, nn.Parameter]]:
    if isinstance(item, nn.Parameter) and not isinstance(item, UninitializedParameter):
        yield name, item
    elif isinstance(item, nn.Module):
        for inner, parameter in item.named_parameters():
            if not isinstance(parameter, UninitializedParameter):
                yield f"{name}.{inner}", parameter
