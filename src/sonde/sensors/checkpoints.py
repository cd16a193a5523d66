"""What a checkpoint in the variables of a program holds that the training goes on without.

A model that has the very weights of a checkpoint was loaded from it. If the checkpoint also holds the state of an
optimizer or a scheduler like the present one, which has none, the run goes on without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sonde.sensors.copies import is_follower, tensor_sets, within
from sonde.sensors.tensors import is_plain

_DEPTH: Final = 2
_COMPARED: Final = 8
_NUMBERS: Final = 4096
_MAX_STATES: Final = 16
_MAX_STORED: Final = 1000
_OWN_COUNTS: Final = 1
"""Steps that a scheduler counts by itself before the first step of the optimizer has ended."""


@dataclass(frozen=True)
class Left:
    """A state that was stored beside the weights of a model, and that the training does not have."""

    what: str
    path: str
    """Where it is stored: the variable, and the key."""
    weights: str
    """Where the weights are stored that the model has."""
    counted: int | None = None
    """How many steps it has counted, where it says so."""


def left_in_checkpoint(
    scopes: Iterable[Mapping[str, Any]],
    models: Iterable[nn.Module],
    optimizer: Optimizer,
    schedulers: Iterable[LRScheduler],
) -> list[Left]:
    """Return what is stored beside the present weights and is missing in an optimizer that has not stepped yet."""
    scopes, models = list(scopes), list(models)
    states = [
        (path, value) for scope in scopes for path, value in within(scope, _DEPTH) if isinstance(value, dict) and value
    ]
    weights = next((path for path, value in states if any(_has_loaded(each, value) for each in models)), None)
    if weights is None:
        return []
    found = []
    stored = [(path, value) for path, value in states if _is_state_of_optimizer(value)][:_MAX_STATES]
    if is_fresh(optimizer):
        found += [
            Left("optimizer", path, weights, _steps(value)) for path, value in stored if _would_fit(value, optimizer)
        ][:1]
    counts = [(path, value) for path, value in states if _is_state_of_scheduler(value)][:_MAX_STATES]
    for scheduler in schedulers:
        if scheduler.optimizer is optimizer and scheduler.last_epoch <= _OWN_COUNTS:
            found += [
                Left("scheduler", path, weights, int(value["last_epoch"]))
                for path, value in counts
                if value["last_epoch"] > _OWN_COUNTS and value["base_lrs"] == scheduler.base_lrs
            ][:1]
    return found + _averages(scopes, states, models, weights) + _scalers(scopes, states, weights)


def _averages(
    scopes: list[Mapping[str, Any]], states: list[tuple[str, dict[Any, Any]]], models: list[nn.Module], weights: str
) -> list[Left]:
    """Return an average of the weights that is stored and differs from the one that the program has."""
    stored = [(path, value) for path, value in states if is_follower(path) and _is_of_one(value, models)]
    held = [each for each in tensor_sets(scopes) if is_follower(each.path) and _is_of_one(each.tensors, models)]
    live = [each for each in held if each.path not in {path for path, _ in stored}]
    for path, value in stored:
        # One that equals the weights has just begun, and any that is live may have been loaded from elsewhere.
        if path != weights and live and not any(_are_equal(value, each.tensors) for each in live):
            return [Left("average", path, weights)]
    return []


def _is_of_one(state: Mapping[Any, Any], models: list[nn.Module]) -> bool:
    """Return whether a state has a tensor for each parameter of a model, or of a copy of one."""
    shapes = [{name: each.shape for name, each in model.named_parameters()} for model in models]
    own = {name: each.shape for name, each in state.items() if isinstance(each, Tensor)}
    return any(each and each.items() <= own.items() for each in shapes)


def _are_equal(one: Mapping[Any, Any], two: Mapping[Any, Any]) -> bool:
    shared = [name for name in two if isinstance(one.get(name), Tensor) and isinstance(two[name], Tensor)]
    pairs = [(_head(one[name]), _head(two[name])) for name in shared[:_COMPARED]]
    return bool(pairs) and all(torch.equal(first, second.to(first.dtype)) for first, second in pairs)


def _scalers(scopes: list[Mapping[str, Any]], states: list[tuple[str, dict[Any, Any]]], weights: str) -> list[Left]:
    """Return the scale of a gradient scaler that is stored and that the scaler of the program does not begin with."""
    stored = [(path, value) for path, value in states if "_growth_tracker" in value and "scale" in value]
    live = [value for scope in scopes for _, value in within(scope) if isinstance(value, torch.amp.GradScaler)]
    begins = {each._init_scale for each in live if each.is_enabled()}
    return [Left("scaler", path, weights) for path, value in stored if begins and value["scale"] not in begins][:1]


def is_fresh(optimizer: Optimizer) -> bool:
    """Return whether an optimizer remembers nothing: no state, or one of zeros and constants as it began with."""
    return not any(_remembers(each) for each in optimizer.state.values())


def _remembers(state: Any) -> bool:
    if not isinstance(state, Mapping):
        return False
    step = state.get("step")
    if isinstance(step, Tensor | int | float) and not isinstance(step, bool):
        return bool(step)
    return any(isinstance(each, Tensor) and bool((each != each.reshape(-1)[:1]).any()) for each in state.values())


def _has_loaded(model: nn.Module, state: Mapping[Any, Any]) -> bool:
    """Return whether a model has the values of a state that lies elsewhere in memory."""
    own = [
        (value, given)
        for name, value in model.named_parameters()
        if isinstance(given := state.get(name, state.get(f"module.{name}")), Tensor) and given.shape == value.shape
    ]
    if len(own) < len(list(model.parameters())) or not own:
        return False
    telling = [(value, given) for value, given in own if is_plain(value) and is_plain(given) and value.numel() > 1]
    if not telling or any(value.data_ptr() == given.data_ptr() for value, given in telling):
        return False
    with torch.no_grad():
        heads = [(_head(value), _head(given)) for value, given in telling[:_COMPARED]]
        varied = any(bool((given != given[:1]).any()) for _, given in heads)
        return varied and all(torch.equal(value, given.to(value.dtype)) for value, given in heads)


def _head(value: Tensor) -> Tensor:
    """Return the first numbers of a tensor, on the host: weights that agree in some thousands of them are the same."""
    return value.detach().reshape(-1)[:_NUMBERS].to("cpu")


def _is_state_of_optimizer(value: Mapping[Any, Any]) -> bool:
    return isinstance(value.get("state"), dict) and isinstance(value.get("param_groups"), list)


def _is_state_of_scheduler(value: Mapping[Any, Any]) -> bool:
    return isinstance(value.get("last_epoch"), int) and isinstance(value.get("base_lrs"), list)


def _would_fit(stored: Mapping[str, Any], optimizer: Optimizer) -> bool:
    """Return whether a stored state was made by an optimizer with the same settings, and remembers something.

    Other settings show that training was meant to begin anew from these weights. The learning rate may have changed
    by a schedule: then the rate that it began with counts.
    """
    states = list(stored["state"].values())[:_MAX_STORED]
    groups, own = stored["param_groups"], optimizer.param_groups
    if not any(map(_remembers, states)) or len(groups) != len(own):
        return False
    return all(_are_same(one, other) for one, other in zip(groups, own, strict=True))


def _are_same(stored: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    if len(stored.get("params", ())) != len(own["params"]):
        return False
    rates = [each.get("initial_lr", each.get("lr")) for each in (stored, own)]
    others = [dict(_plain(each)) for each in (stored, own)]
    return _plainly(rates[0]) == _plainly(rates[1]) and others[0] == others[1]


def _plain(group: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in group.items():
        if name not in ("lr", "initial_lr", "params") and isinstance(value, bool | int | float | str | tuple):
            yield name, value


def _plainly(rate: Any) -> Any:
    return float(rate) if isinstance(rate, Tensor) and rate.numel() == 1 else rate


def _steps(stored: Mapping[str, Any]) -> int | None:
    counts = (each.get("step") for each in stored["state"].values() if isinstance(each, Mapping))
    found = next((each for each in counts if isinstance(each, Tensor | int | float)), None)
    return None if found is None else int(found)
