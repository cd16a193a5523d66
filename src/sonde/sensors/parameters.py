"""Sensors for parameters that training does not reach as the program means it to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from sonde.core.facts import HiddenFacts
from sonde.hooks.names import named_modules, unwrap
from sonde.record.kinds import is_fsdp_part
from sonde.schedule import at
from sonde.sensors.sensor import Context, Sensor, StepEnd

MAX_HIDDEN: Final = 64
_MAX_ITEMS: Final = 1000


class HiddenParameters(Sensor):
    """Modules in a plain list, tuple or dict, and plain tensors with a gradient: torch registers neither.

    Their parameters get gradients like any others, but neither `parameters()` nor an optimizer made from it has them,
    nor do `to(device)` and `state_dict()`. A module that is kept out of sight on purpose, a teacher for instance, is
    frozen, or held by another optimizer, or written to by the program, and is left alone. Counts steps.
    """

    produces = ("facts.hidden",)
    when = at(3)
    cost = "a walk over the attributes of the modules, once"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._found: list[tuple[str, Tensor, int]] = []

    def start(self) -> None:
        """Find them."""
        models = self.context.watched.models
        seen = {id(each) for model in models.values() for each in model.parameters()}
        for name, parameter in _hidden(models):
            if id(parameter) not in seen and parameter.requires_grad and len(self._found) < MAX_HIDDEN:
                seen.add(id(parameter))
                self._found.append((name, parameter, parameter._version))

    def on_step_end(self, end: StepEnd) -> None:
        """Report those that have a gradient and still are as they were."""
        if not self._found:
            self.finish()
        elif self.when(self.context.steps):
            hidden = tuple(
                HiddenFacts(
                    name=name,
                    shape=tuple(parameter.shape),
                    reached=True,
                    tensor=not isinstance(parameter, nn.Parameter),
                )
                for name, parameter, version in self._found
                if parameter.grad is not None and parameter._version == version
            )
            self._found = []
            self.context.book.add(hidden=hidden)


class BrokenTies(Sensor):
    """Embeddings that the model's own settings call one (`tie_word_embeddings`), though they are two."""

    produces = ("facts.tied",)
    when = at(0)
    cost = "a look at the settings of the model, once"

    def start(self) -> None:
        """Find them."""
        names, models = self.context.book.names, self.context.watched.models
        pairs = (_broken_tie(unwrap(root), names) for root in models.values())
        self.context.book.add(tied=tuple(pair for pair in pairs if pair is not None))


def _broken_tie(root: nn.Module, names: Mapping[int, str]) -> tuple[str, str] | None:
    """Return the names of two embeddings that the model's settings say are one, though they are two."""
    if getattr(getattr(root, "config", None), "tie_word_embeddings", False) is not True:
        return None
    ends = [getattr(root, name, None) for name in ("get_input_embeddings", "get_output_embeddings")]
    weights = [getattr(end(), "weight", None) for end in ends if callable(end)]
    if len(weights) != 2 or weights[0] is weights[1] or not all(id(weight) in names for weight in weights):
        return None
    return names[id(weights[0])], names[id(weights[1])]


def _hidden(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for name, module, _ in named_modules(dict(models)):
        if is_fsdp_part(module):
            continue  # flat parameters and views of them are in lists and attributes of its own
        before = "" if name == "(model)" else f"{name}."
        for key, value in vars(module).items():
            if _is_trained(value):
                yield f"{before}{key}", value
            elif not key.startswith("_"):
                for place, item in _items(value):
                    yield from _parameters(f"{before}{key}.{place}", item)


def _is_trained(value: Any) -> bool:
    """Return whether an attribute is a tensor to be trained: it stores gradients and is not a result."""
    try:
        return type(value) is Tensor and value.requires_grad and value.is_leaf
    except RuntimeError:  # a view whose base was written to since
        return False


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
