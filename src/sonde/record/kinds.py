"""Decide what kind of optimizer, gradient scaler, wrapper or parallel layout an object is.

This is the one place that knows such quirks of torch, Accelerate, Lightning and others. What the rules need is recorded
as plain data (`facts.OptimizerTraits`); the modules that wrap a model are in `hooks.names`, which needs them for names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from sonde.core.facts import OptimizerTraits, optimizer_traits
from sonde.hooks.names import is_compiled_wrapper

# Wrappers that hand `step` on to the optimizer in their attribute `optimizer`: of Accelerate, Lightning and Fabric.
_OPTIMIZER_WRAPPERS: Final = frozenset({"AcceleratedOptimizer", "LightningOptimizer", "_FabricOptimizer"})
# Modules that communicate with other processes in their forward.
_COLLECTIVE: Final = frozenset({"SyncBatchNorm", "FullyShardedDataParallel"})

# ---------------------------------------------------------------------- optimizers


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that really steps inside the wrappers of frameworks; an ordinary one is returned itself."""
    while any(base.__name__ in _OPTIMIZER_WRAPPERS for base in type(optimizer).__mro__):
        optimizer = optimizer.optimizer
    return optimizer


def traits_of(optimizer: Optimizer) -> OptimizerTraits:
    """Return what an optimizer does, as plain data. A subclass has the traits of the classes it is made from."""
    names = [base.__name__ for base in type(optimizer).__mro__ if base not in (Optimizer, object)]
    return optimizer_traits(names, optimizer.param_groups)


def step_count(optimizer: Optimizer, parameter: Tensor) -> float | None:
    """Return how many steps an optimizer's own state counts for a parameter; None if it keeps no such number here.

    A number on a device would have to be waited for.
    """
    count = optimizer.state.get(parameter, {}).get("step")
    if count is None:  # a schedule-free optimizer counts by group
        count = next((group.get("k") for group in optimizer.param_groups if "train_mode" in group), None)
    if isinstance(count, Tensor) and (count.device.type != "cpu" or count.numel() != 1):
        return None
    return float(count) if isinstance(count, Tensor | int | float) else None


def skips_on_device(optimizer: Optimizer) -> bool:
    """Return whether an optimizer can be left to skip a step by the number `found_inf` on the device."""
    # Others may call something of theirs fused that knows nothing of `found_inf`.
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
    """Return the scale of the gradients that a fused optimizer is handed and divides by itself; None elsewhere."""
    return getattr(optimizer, "grad_scale", None)


def skip_flag(optimizer: Optimizer) -> Any:
    """Return the number by which a fused optimizer skips its step, if a gradient scaler has handed it one."""
    return getattr(optimizer, "found_inf", None)


def is_still_scaled(scaler: Any, optimizer: Any) -> bool:
    """Return whether an optimizer's gradients are still multiplied by a scaler's scale."""
    if not scaler.is_enabled():
        return False
    state = scaler._per_optimizer_states.get(id(optimizer))
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
    return any(
        type(module).__name__ in _COLLECTIVE or getattr(module, "_is_fsdp_managed_module", False)
        for module in model.modules()
    ) or any(map(is_sharded, model.parameters()))


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this process holds only a part of a tensor (a DTensor)."""
    return hasattr(tensor, "to_local")
