"""Collect facts about the objects of a training program; see `sonde.core.facts`.

The static facts are gathered once, when a session attaches. What turns out later (losses, the order of modules, an
optimizer that was found) is added, and the facts are stated again as a whole.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from sonde.core.facts import (
    Facts,
    GroupFacts,
    LoaderFacts,
    LossFacts,
    ModuleFacts,
    OptimizerFacts,
    ParameterFacts,
    Plain,
    SchedulerFacts,
)
from sonde.hooks.names import named_modules, named_parameters
from sonde.record.extensions import Watched
from sonde.record.kinds import class_of, traits_of

MAX_LOSSES: Final = 16
_MAX_TEXT: Final = 100
_MAX_ITEMS: Final = 8
_OF_LOADER: Final = ("batch_size", "num_workers", "drop_last", "pin_memory", "persistent_workers", "prefetch_factor")
_GENERATORS: Final = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)


class FactBook:
    """Holds the facts of one program; `is_new` is set when they have changed since they were last taken."""

    def __init__(self) -> None:
        self.is_new = False
        self.names: dict[int, str] = {}
        """The names of the watched parameters, by id."""
        self._optimizers: dict[str, OptimizerFacts] = {}
        self._parameters: tuple[ParameterFacts, ...] = ()
        self._facts: Facts | None = None

    def gather(self, watched: Watched) -> None:
        """Gather what is known before the first step."""
        roots, helpers = dict(watched.models), watched.helpers
        self.names = {id(parameter): name for name, parameter, _ in named_parameters(roots)}
        self._optimizers = {name: optimizer_facts(name, each, self.names) for name, each in watched.optimizers}
        self._parameters = _parameter_facts(roots)
        scheduler, scaler = helpers.scheduler, helpers.scaler
        self._facts = Facts(
            modules=tuple(_module_facts(name, module) for name, module, _ in named_modules(roots)),
            scheduler=None
            if scheduler is None
            else scheduler_facts(scheduler, {id(each): name for name, each in watched.optimizers}),
            scaler=scaler is not None and bool(scaler.is_enabled()),
        )
        self.is_new = True

    def take(self) -> Facts:
        """Return all facts as they stand."""
        self.is_new = False
        owners: dict[str, list[str]] = {}
        for optimizer in self._optimizers.values():
            for name in {name for group in optimizer.groups for name in group.parameters}:
                owners.setdefault(name, []).append(optimizer.name)
        parameters = tuple(replace(each, owners=tuple(owners.get(each.name, ()))) for each in self._parameters)
        return replace(self._facts or Facts(), parameters=parameters, optimizers=tuple(self._optimizers.values()))

    def add(self, **found: Any) -> None:
        """Set fields of the facts."""
        # Without what was gathered first, the facts would be taken for those of a program that has no modules.
        if self._facts is not None and any(getattr(self._facts, name) != value for name, value in found.items()):
            self._facts = replace(self._facts, **found)
            self.is_new = True

    def add_values(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        """Add by name what the initial values of parameters say."""
        self._parameters = tuple(replace(each, **values.get(each.name, {})) for each in self._parameters)
        self.is_new = self._facts is not None

    def add_loss(self, loss: LossFacts) -> None:
        """Add how a loss was called, unless it has been called like that before."""
        known = self._facts.losses if self._facts is not None else ()
        # The last batch of an epoch is smaller than the others; that makes it no other loss.
        if not any(_is_same(loss, each) for each in known) and len(known) < MAX_LOSSES:
            self.add(losses=(*known, loss))

    def add_carried(self, name: str) -> None:
        """Add a recurrent module that begins with the state of the step before."""
        known = self._facts.carried if self._facts is not None else ()
        if name not in known:
            self.add(carried=(*known, name))

    def drop_optimizer(self, name: str) -> None:
        """Forget an optimizer that does not step its parameters."""
        if self._optimizers.pop(name, None) is not None:
            self.is_new = True

    def add_optimizer(self, name: str, optimizer: Any) -> None:
        """Add an optimizer that was found, or that has other parameters now."""
        facts = optimizer_facts(name, optimizer, self.names)
        if self._facts is not None and self._optimizers.get(name) != facts:
            self._optimizers[name] = facts
            self.is_new = True


def optimizer_facts(name: str, optimizer: Any, names: Mapping[int, str]) -> OptimizerFacts:
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
        kind=class_of(optimizer).__name__,
        groups=groups,
        recorded_traits=traits_of(optimizer),
        foreign=tuple(str(tuple(each.shape)) for each in held if id(each) not in names),
        duplicates=tuple(names[key] for key, count in seen.items() if count > 1 and key in names),
    )


def _parameter_facts(roots: dict[str, nn.Module]) -> tuple[ParameterFacts, ...]:
    kinds = {name: type(module).__name__ for name, module, _ in named_modules(roots)}
    return tuple(
        _one_parameter(name, parameter, aliases, kinds) for name, parameter, aliases in named_parameters(roots)
    )


def _one_parameter(
    name: str, parameter: nn.Parameter, aliases: tuple[str, ...], kinds: Mapping[str, str]
) -> ParameterFacts:
    lazy = isinstance(parameter, nn.parameter.UninitializedParameter)
    return ParameterFacts(
        name=name,
        shape=() if lazy else tuple(parameter.shape),
        dtype=str(parameter.dtype).removeprefix("torch."),
        trainable=parameter.requires_grad,
        kind=kinds.get(name.rpartition(".")[0] or "(model)", ""),
        aliases=aliases,
    )


def _module_facts(name: str, module: nn.Module) -> ModuleFacts:
    public = {key: value for key, value in vars(module).items() if not key.startswith("_") and key != "training"}
    settings = _settings(public.items())
    settings |= {key: parameter is not None for key, parameter in module._parameters.items()}
    return ModuleFacts(name=name, kind=type(module).__name__, training=module.training, settings=settings)


def loader_facts(loader: Any) -> LoaderFacts:
    """Return the plain settings of a loader; what it does not say is left out."""
    settings: dict[str, Plain] = {}
    for name in _OF_LOADER:
        value = getattr(loader, name, None)
        if isinstance(value, bool | int | float):
            settings[name] = value
    dataset = getattr(loader, "dataset", None)
    if dataset is not None:
        settings["dataset_kind"] = type(dataset).__name__
        settings["iterable"] = isinstance(dataset, IterableDataset)
        settings["generator_in_dataset"] = any(
            isinstance(value, _GENERATORS) for value in getattr(dataset, "__dict__", {}).values()
        )
    if isinstance(loader, DataLoader):
        settings |= _order(loader)
    settings |= _lengths(loader, dataset)
    return LoaderFacts(kind=type(loader).__name__, settings=settings)


def _order(loader: DataLoader[Any]) -> dict[str, Plain]:
    settings: dict[str, Plain] = {"sampler": type(loader.sampler).__name__}
    settings["worker_init_fn"] = loader.worker_init_fn is not None
    if isinstance(loader.sampler, RandomSampler):
        settings["shuffle"] = True
        settings["replacement"] = bool(loader.sampler.replacement)
    elif isinstance(loader.sampler, SequentialSampler):
        settings["shuffle"] = False
    return settings


def _lengths(loader: Any, dataset: Any) -> dict[str, Plain]:
    found: dict[str, Plain] = {}
    if isinstance(dataset, IterableDataset):
        return found  # asking such a loader for its length makes it check that length from then on
    for name, each in (("length", loader), ("dataset_length", dataset)):
        try:
            found[name] = len(each)
        except (TypeError, NotImplementedError, AttributeError):
            continue  # it has none, or does not know it
    return found


def scheduler_facts(scheduler: Any, optimizers: Mapping[int, str]) -> SchedulerFacts:
    """Return the plain settings of a scheduler, where `optimizers` has the names of the watched ones by id."""
    settings = _settings((key, value) for key, value in vars(scheduler).items() if not key.startswith("_"))
    inner = getattr(scheduler, "optimizer", None)
    if isinstance(inner, Optimizer) and optimizers:
        settings["optimizer"] = optimizers.get(id(inner), "")
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


def _is_same(one: LossFacts, other: LossFacts) -> bool:
    """Return whether two calls are of one loss.

    A call may be seen at `torch.nn.functional`, or below it with fewer of its settings: those that both have count.
    """
    shared = one.settings.keys() & other.settings.keys()
    forms = [
        (each.kind, len(each.input_shape), each.made_by, {name: each.settings[name] for name in shared})
        for each in (one, other)
    ]
    return forms[0] == forms[1]
