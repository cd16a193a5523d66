"""State what the objects of a training program say about themselves; see `sonde.facts`.

The static facts are gathered once, when a session attaches. What turns out later (losses, the order of modules, an
optimizer that was found) is added, and the facts are stated again as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sonde.facts import (
    ColumnFacts,
    Facts,
    GroupFacts,
    HiddenFacts,
    LossFacts,
    ModuleFacts,
    OptimizerFacts,
    ParameterFacts,
    Plain,
    ReshapeFacts,
    SchedulerFacts,
    SoftmaxFacts,
)
from sonde.hooks.names import named_modules, named_parameters, unwrap
from sonde.record.kinds import traits_of
from sonde.taps.initial_values import InitialValues, look_at
from sonde.taps.loader_facts import loader_facts
from sonde.taps.passes import PassTrace

MAX_LOSSES: Final = 16
_MAX_TEXT: Final = 100
_MAX_ITEMS: Final = 8


class FactBook:
    """Holds the facts of one program; `is_new` says that they have changed since they were last taken."""

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Sequence[tuple[str, Optimizer]],
        *,
        loader: Any,
        scheduler: Any,
        scaler: Any,
    ) -> None:
        self.is_new = True
        roots = dict(models)
        named = list(named_parameters(roots))
        self._names = {id(parameter): name for name, parameter, _ in named}
        self._optimizers = {name: optimizer_facts(name, each, self._names) for name, each in optimizers}
        self._parameters = _parameter_facts(roots)
        self._scheduler = scheduler
        self._facts = Facts(
            modules=tuple(_module_facts(name, module) for name, module, _ in named_modules(roots)),
            loader=loader_facts(loader) if loader is not None else None,
            scheduler=_scheduler_facts(scheduler, dict(optimizers)) if scheduler is not None else None,
            scaler=scaler is not None and bool(scaler.is_enabled()),
            tied=tuple(pair for root in roots.values() if (pair := _broken_tie(unwrap(root), self._names)) is not None),
        )

    def take(self) -> Facts:
        """Return all facts as they stand."""
        self.is_new = False
        owners: dict[str, list[str]] = {}
        for optimizer in self._optimizers.values():
            for name in {name for group in optimizer.groups for name in group.parameters}:
                owners.setdefault(name, []).append(optimizer.name)
        parameters = tuple(replace(each, owners=tuple(owners.get(each.name, ()))) for each in self._parameters)
        return replace(self._facts, parameters=parameters, optimizers=tuple(self._optimizers.values()))

    def add_loss(self, loss: LossFacts) -> None:
        """Note how a loss was called, unless it has been called like that before."""
        # The last batch of an epoch is smaller than the others; that makes it no other loss.
        if _form(loss) in {_form(each) for each in self._facts.losses}:
            return
        if len(self._facts.losses) < MAX_LOSSES:
            self._facts = replace(self._facts, losses=(*self._facts.losses, loss))
            self.is_new = True

    def add_softmaxes(self, softmaxes: Sequence[SoftmaxFacts]) -> None:
        """Note which dimensions softmaxes run over."""
        self._facts = replace(self._facts, softmaxes=tuple(softmaxes))
        self.is_new = self.is_new or bool(softmaxes)

    def add_marks(self, reshapes: Sequence[ReshapeFacts], columns: Sequence[ColumnFacts], bootstrapped: str) -> None:
        """Note what the graph of the loss says about shapes and targets."""
        self._facts = replace(self._facts, reshapes=tuple(reshapes), columns=tuple(columns), bootstrapped=bootstrapped)
        self.is_new = self.is_new or bool(reshapes or columns or bootstrapped)

    def add_input_gradient(self) -> None:
        """Note that a gradient of what is no parameter is asked for."""
        self._facts = replace(self._facts, input_gradient=True)
        self.is_new = True

    def add_carried(self, name: str) -> None:
        """Note a recurrent module that begins with the state of the step before."""
        if name not in self._facts.carried:
            self._facts = replace(self._facts, carried=(*self._facts.carried, name))
            self.is_new = True

    def add_hidden(self, hidden: tuple[HiddenFacts, ...]) -> None:
        """Note parameters that nobody knows of."""
        self._facts = replace(self._facts, hidden=hidden)
        self.is_new = self.is_new or bool(hidden)

    def add_optimizer(self, name: str, optimizer: Optimizer) -> None:
        """Note an optimizer that was found, or that has other parameters now."""
        facts = optimizer_facts(name, optimizer, self._names)
        if self._optimizers.get(name) != facts:
            self._optimizers[name] = facts
            self.is_new = True

    def add_passes(self, trace: PassTrace) -> None:
        """Note how modules followed each other."""
        found = replace(self._facts, order=tuple(trace.order), edges=tuple(trace.edges), autocast=trace.autocast)
        self.is_new = self.is_new or found != self._facts
        self._facts = found


def optimizer_facts(name: str, optimizer: Optimizer, names: Mapping[int, str]) -> OptimizerFacts:
    """Return what an optimizer holds, where `names` has the names of the watched parameters by id."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    seen: dict[int, int] = {}
    for parameter in held:
        seen[id(parameter)] = seen.get(id(parameter), 0) + 1
    groups = tuple(
        GroupFacts(
            settings=_settings(group.items()),
            parameters=tuple(names[id(each)] for each in group["params"] if id(each) in names),
        )
        for group in optimizer.param_groups
    )
    return OptimizerFacts(
        name=name,
        kind=type(optimizer).__name__,
        groups=groups,
        recorded_traits=traits_of(optimizer),
        foreign=tuple(str(tuple(each.shape)) for each in held if id(each) not in names),
        duplicates=tuple(names[key] for key, count in seen.items() if count > 1 and key in names),
    )


def _parameter_facts(roots: dict[str, nn.Module]) -> tuple[ParameterFacts, ...]:
    kinds = {name: type(module).__name__ for name, module, _ in named_modules(roots)}
    named = list(named_parameters(roots))
    values = look_at([(name, parameter) for name, parameter, _ in named])
    return tuple(
        _one_parameter(name, parameter, aliases, kinds, values.get(name, InitialValues()))
        for name, parameter, aliases in named
    )


def _one_parameter(
    name: str, parameter: nn.Parameter, aliases: tuple[str, ...], kinds: Mapping[str, str], values: InitialValues
) -> ParameterFacts:
    lazy = isinstance(parameter, nn.parameter.UninitializedParameter)
    return ParameterFacts(
        name=name,
        shape=() if lazy else tuple(parameter.shape),
        dtype=str(parameter.dtype).removeprefix("torch."),
        trainable=parameter.requires_grad,
        kind=kinds.get(name.rpartition(".")[0] or "(model)", ""),
        aliases=aliases,
        equal_to=values.equal_to,
        constant=values.constant,
        zero=values.zero,
        equal_rows=values.equal_rows,
    )


def _module_facts(name: str, module: nn.Module) -> ModuleFacts:
    public = {key: value for key, value in vars(module).items() if not key.startswith("_") and key != "training"}
    settings = _settings(public.items())
    settings |= {key: parameter is not None for key, parameter in module._parameters.items()}
    return ModuleFacts(name=name, kind=type(module).__name__, training=module.training, settings=settings)


def _scheduler_facts(scheduler: Any, optimizers: Mapping[str, Optimizer]) -> SchedulerFacts:
    settings = _settings((key, value) for key, value in vars(scheduler).items() if not key.startswith("_"))
    inner = getattr(scheduler, "optimizer", None)
    if isinstance(inner, Optimizer) and optimizers:
        settings["optimizer"] = next((name for name, each in optimizers.items() if each is inner), "")
    return SchedulerFacts(kind=type(scheduler).__name__, settings=settings)


def _settings(items: Iterable[tuple[str, Any]]) -> dict[str, Plain]:
    """Keep what is plain: numbers, short texts, and short tuples of numbers, each as `name0`, `name1`, ..."""
    found: dict[str, Plain] = {}
    for key, value in items:
        if isinstance(value, tuple | list) and key != "params" and len(value) <= _MAX_ITEMS:
            found |= {f"{key}{index}": item for index, item in enumerate(value) if isinstance(item, bool | int | float)}
        elif isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":
            found[key] = float(value.detach())
        elif isinstance(value, torch.dtype):
            found[key] = str(value).removeprefix("torch.")
        elif isinstance(value, bool | int | float | None) or (isinstance(value, str) and len(value) <= _MAX_TEXT):
            found[key] = value
    return found


def _broken_tie(root: nn.Module, names: Mapping[int, str]) -> tuple[str, str] | None:
    """Return the names of two embeddings that the model's settings say are one, though they are two."""
    if getattr(getattr(root, "config", None), "tie_word_embeddings", False) is not True:
        return None
    ends = [getattr(root, name, None) for name in ("get_input_embeddings", "get_output_embeddings")]
    weights = [getattr(end(), "weight", None) for end in ends if callable(end)]
    if len(weights) != 2 or weights[0] is weights[1] or not all(id(weight) in names for weight in weights):
        return None
    return names[id(weights[0])], names[id(weights[1])]


def _form(loss: LossFacts) -> tuple[Any, ...]:
    return loss.kind, tuple(loss.settings.items()), len(loss.input_shape), loss.made_by
