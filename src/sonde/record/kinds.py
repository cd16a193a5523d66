"""Decide what kind of optimizer, gradient scaler, wrapper or parallel layout an object is.

This is the one place that knows such quirks of torch, Accelerate, Lightning and others. What the rules need is recorded
as plain data (`facts.OptimizerTraits`); the modules that wrap a model are in `hooks.names`, which needs them for names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from sonde.core.facts import OptimizerTraits, optimizer_traits
from sonde.hooks.names import is_compiled_wrapper

# How many wrappers around one another are looked into.
_MAX_WRAPPERS: Final = 4
# Attributes of an optimizer in which there is no other optimizer.
_OWN_ATTRIBUTES: Final = frozenset({"state", "param_groups", "defaults"})
# Modules that communicate with other processes in their forward.
_COLLECTIVE: Final = frozenset({"SyncBatchNorm", "FullyShardedDataParallel"})

# ---------------------------------------------------------------------- optimizers


@dataclass(slots=True)
class Given:
    """The optimizers and other objects found in what the user passed as optimizers."""

    optimizers: list[Optimizer] = field(default_factory=list)
    """Those of torch whose steps can be seen."""
    wrappers: list[Any] = field(default_factory=list)
    """Objects that pass `step` on to them."""
    opaque: list[Any] = field(default_factory=list)
    """Objects whose steps cannot be seen."""


def see_through(objects: Iterable[Any]) -> Given:
    """Find the torch optimizers that really step inside these objects: wrappers of frameworks, the user's classes."""
    given = Given()
    for each in objects:
        inner = _inside(each, _MAX_WRAPPERS, {id(each)})
        covered = {id(parameter) for optimizer in inner for parameter in parameters_of(optimizer)}
        is_whole = _has_hooks(each) and not covered.issuperset(map(id, parameters_of(each)))
        if not inner or is_whole:
            found, known = [each], given.optimizers if _has_hooks(each) else given.opaque
        else:
            given.wrappers.append(each)
            found, known = inner, given.optimizers
        # An optimizer may be given beside its wrapper.
        known += [optimizer for optimizer in found if all(optimizer is not other for other in known)]
    return given


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Return all parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _has_hooks(optimizer: Any) -> bool:
    """Return whether torch calls its hooks around the steps of an object: `Optimizer.__init__` arranges that."""
    return isinstance(optimizer, Optimizer) and hasattr(type(optimizer).step, "hooked")


def _inside(wrapper: Any, depth: int, seen: set[int]) -> list[Optimizer]:
    """Return the innermost optimizers that an object holds, in attributes, lists and dicts."""
    try:
        attributes = {key: value for key, value in vars(wrapper).items() if key not in _OWN_ATTRIBUTES}
    except TypeError:  # it has slots, or is a proxy
        return []
    found: list[Optimizer] = []
    for value in (item for attribute in attributes.values() for item in _items(attribute)):
        # A weak proxy claims the class of its referent, but has another type.
        if id(value) in seen or not callable(getattr(type(value), "step", None)):
            continue
        seen.add(id(value))
        inner = _inside(value, depth - 1, seen) if depth else []
        found += inner or ([value] if _has_hooks(value) else [])
    return found


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, list | tuple):
        return value
    return value.values() if isinstance(value, dict) else (value,)


class InBackward:
    """Optimizers that step inside the backward pass, usually one for each parameter, seen as one optimizer."""

    def __init__(self) -> None:
        self._members: dict[int, Optimizer] = {}

    def add(self, optimizer: Optimizer) -> bool:
        """Add a member; return whether it is new."""
        is_new = id(optimizer) not in self._members
        self._members[id(optimizer)] = optimizer
        return is_new

    @property
    def kind(self) -> type:
        """The class of its members."""
        return type(next(iter(self._members.values())))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all members; those with the same settings are put together."""
        groups: dict[str, dict[str, Any]] = {}
        for group in (group for each in self._members.values() for group in each.param_groups):
            settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            merged = groups.setdefault(repr(sorted(settings.items(), key=str)), settings | {"params": []})
            merged["params"] += group["params"]
        return list(groups.values())

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """What all members keep for their parameters."""
        return {key: value for each in self._members.values() for key, value in each.state.items()}


def class_of(optimizer: Any) -> type:
    """Return the class of an optimizer, or of the members of several that are seen as one."""
    return optimizer.kind if isinstance(optimizer, InBackward) else type(optimizer)


def traits_of(optimizer: Any) -> OptimizerTraits:
    """Return what an optimizer does, as plain data. A subclass has the traits of the classes it is made from."""
    names = [base.__name__ for base in class_of(optimizer).__mro__ if base not in (Optimizer, object)]
    return optimizer_traits(names, optimizer.param_groups)


def step_count(optimizer: Any, parameter: Tensor) -> float | None:
    """Return how many steps an optimizer's own state counts for a parameter; None if it keeps no such number here.

    A number on a device would have to be waited for.
    """
    count = optimizer.state.get(parameter, {}).get("step")
    if count is None:  # a schedule-free optimizer counts by group
        count = next((group.get("k") for group in optimizer.param_groups if "train_mode" in group), None)
    if isinstance(count, Tensor) and (count.device.type != "cpu" or count.numel() != 1):
        return None
    return float(count) if isinstance(count, Tensor | int | float) else None


def steps_counted(optimizer: Any) -> float | None:
    """Return how many steps an optimizer's own state counts for the first parameter that has a state."""
    parameter = next((each for each in parameters_of(optimizer) if optimizer.state.get(each)), None)
    return None if parameter is None else step_count(optimizer, parameter)


def skips_on_device(optimizer: Optimizer) -> bool:
    """Return whether an optimizer can be left to skip a step by the number `found_inf` on the device."""
    # Other libraries may have a `fused` option without support for `found_inf`.
    knows = getattr(optimizer, "_step_supports_amp_scaling", False)
    if not knows or not all(group.get("fused") for group in optimizer.param_groups):
        return False
    # Torch makes the momentum of a fused SGD without filling it, and does not fill it in a step that is skipped: it may
    # skip only if it has stepped before.
    has_momentum = any(group.get("momentum") for group in optimizer.param_groups)
    return not has_momentum or all(
        "momentum_buffer" in optimizer.state.get(parameter, {}) for parameter, _ in gradients_of(optimizer)
    )


def gradients_of(optimizer: Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the parameters of an optimizer that have a gradient, with it."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter, parameter.grad


# ---------------------------------------------------------------------- gradient scalers


def scale_handed_over(optimizer: Optimizer) -> Any:
    """Return the scale of the gradients that a fused optimizer gets and divides by itself; None elsewhere."""
    return getattr(optimizer, "grad_scale", None)


def skip_flag(optimizer: Optimizer) -> Any:
    """Return the number that makes a fused optimizer skip its step, if a gradient scaler has set one."""
    return getattr(optimizer, "found_inf", None)


def is_still_scaled(scaler: Any, key: int) -> bool:
    """Return whether the gradients of the optimizer with this id are still multiplied by a scaler's scale."""
    if not scaler.is_enabled():
        return False
    state = scaler._per_optimizer_states.get(key)
    return state is None or state["stage"] is OptState.READY


def scale_of(scaler: Any) -> Tensor | None:
    """Return a scaler's scale on its device, without waiting; None before its first use."""
    scale = getattr(scaler, "_scale", None)
    return scale if isinstance(scale, Tensor) else None


# ---------------------------------------------------------------------- models and parallel layouts


def is_compiled(module: nn.Module) -> bool:
    """Return whether calls of a module run compiled code, whether it is wrapped or was compiled in place."""
    return is_compiled_wrapper(module) or module._compiled_call_impl is not None


def needs_other_ranks(model: nn.Module) -> bool:
    """Return whether a forward of this model communicates with other processes.

    FSDP marks the modules whose parameters it gathers, also where only a wrapper around the model does so; those of
    `fully_shard` and of tensor parallelism are spread over processes.
    """
    return any(type(module).__name__ in _COLLECTIVE or is_fsdp_part(module) for module in model.modules()) or any(
        map(is_sharded, model.parameters())
    )


def is_fsdp_part(module: nn.Module) -> bool:
    """Return whether the first version of FSDP keeps the parameters of a module, or is the module."""
    return type(module).__name__ == "FullyShardedDataParallel" or getattr(module, "_is_fsdp_managed_module", False)


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this process holds only a part of a tensor (a DTensor)."""
    return hasattr(tensor, "to_local")
