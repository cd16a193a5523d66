"""Repeat the step of a bundle, and say whether the same operation goes wrong again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from sonde.errors import OptionError
from sonde.forensics.bundle import Bundle, checksums
from sonde.forensics.findings import finding_of
from sonde.forensics.origin import Origin, origin_of
from sonde.forensics.repeat import repeat
from sonde.forensics.values import badness
from sonde.hooks.names import named_modules, named_parameters
from sonde.records import Finding

# How to get an operation's input back from the result that autograd kept.
_INVERSE: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "sqrt": lambda result: result * result,
    "rsqrt": lambda result: 1 / (result * result),
    "reciprocal": lambda result: 1 / result,
    "exp": lambda result: result.log(),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """What came of repeating a step."""

    bundle: Bundle
    confirmed: bool
    """The operation of the bundle went wrong again, in the same module and line."""
    identical: bool | None
    """All outputs are bit for bit those of the step; None if they were not recorded."""
    finding: Finding | None
    """What the repetition found, in words."""

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as JSON-ready values."""
        return {
            "bundle": str(self.bundle.path),
            "step": self.bundle.step,
            "confirmed": self.confirmed,
            "identical": self.identical,
            "finding": None if self.finding is None else self.finding.to_json(),
            "recorded": self.bundle.info.get("finding"),
        }


def replay(bundle: Bundle, model: nn.Module | Callable[[], nn.Module]) -> Replay:
    """Repeat the step of a bundle on a model, which gets the bundle's weights.

    Raises:
        OptionError: `model` is not a module and builds none.
        RunDamaged: The bundle cannot be read, or belongs to another model.

    """
    module = model if isinstance(model, nn.Module) else model()
    if not isinstance(module, nn.Module):
        raise OptionError(f"the model to replay on must be a torch.nn.Module; {model!r:.60} gave {type(module)}.")
    kept, tensors = bundle.load(module)
    names = {id(each): name for name, each, _ in named_modules({"": module})}
    names |= {id(each): name for name, each, _ in named_parameters({"": module})}
    recorded = bundle.origin
    repetition = repeat(kept, names, backward=bool(kept.gradients))
    identical = _identical(bundle, repetition.outputs)
    root = repetition.forward_root() or repetition.backward_root()
    origin = origin_of(root, kept) if root is not None else None
    if recorded is not None and not _is_in_model(recorded):
        origin = _repeat_operation(recorded, tensors, identical)
    elif origin is not None and recorded is not None and origin.line is None:
        origin = replace(origin, line=recorded.line)  # the program's own call of the model is not repeated
    confirmed = origin is not None and (recorded is None or _is_same(origin, recorded))
    finding = finding_of(origin, bundle.step) if origin is not None else None
    return Replay(bundle=bundle, confirmed=confirmed, identical=identical, finding=finding)


def _is_in_model(recorded: Origin) -> bool:
    if recorded.stage == "data":
        return not recorded.op
    return bool(recorded.module) and recorded.stage in ("weights", "forward", "backward")


def _is_same(origin: Origin, recorded: Origin) -> bool:
    # The model of a bundle may have been one of several, with a prefix before its names.
    names = (recorded.module, origin.module)
    same_module = names[0] == names[1] or names[0].endswith(f".{names[1]}") or names[1] == "(model)"
    return same_module and replace(origin, module=recorded.module).same_place(recorded)


def _identical(bundle: Bundle, outputs: list[tuple[str, Tensor]]) -> bool | None:
    recorded = bundle.info.get("outputs")
    return checksums(outputs) == recorded if recorded else None


def _repeat_operation(recorded: Origin, tensors: dict[str, Tensor], identical: bool | None) -> Origin | None:
    """Run an operation of the loss's own code once more, on what it was given.

    The code itself is the program's; but what the operation met is in the bundle. Where the outputs of the model come
    out differently, it would have met something else.
    """
    operands = {name.removeprefix("operand."): each for name, each in tensors.items() if name.startswith("operand.")}
    if identical is False or not operands:
        return None
    if recorded.stage == "data":
        return recorded if any(badness(each) for each in operands.values()) else None
    result = _backward_of(recorded, operands) if recorded.stage == "backward" else _forward_of(recorded, operands)
    return recorded if result is not None and badness(result) else None


def _forward_of(recorded: Origin, operands: dict[str, Tensor]) -> Tensor | None:
    packet = getattr(torch.ops.aten, recorded.name, None)
    for name in packet.overloads() if packet is not None else ():
        schema = getattr(packet, name)._schema
        given = {**recorded.scalars, **operands}
        arguments = {each.name: given.get(each.name) for each in schema.arguments if not _can_stay_out(each, given)}
        if not all(each.name in given or _is_optional(each) for each in schema.arguments if each.name in arguments):
            continue
        if not set(operands) <= set(arguments):
            continue
        try:
            result = getattr(packet, name)(**arguments)
        except (RuntimeError, TypeError):
            continue
        result = result[0] if isinstance(result, tuple) else result
        return result if isinstance(result, Tensor) else None
    return None


def _can_stay_out(argument: Any, given: dict[str, Any]) -> bool:
    return argument.name not in given and bool(argument.has_default_value())


def _is_optional(argument: Any) -> bool:
    return str(argument.type).startswith("Optional")


def _backward_of(recorded: Origin, operands: dict[str, Tensor]) -> Tensor | None:
    name = recorded.name
    if "result" in operands and name in _INVERSE:
        value = _INVERSE[name](operands["result"])
    elif "self" in operands:
        value = operands["self"]
    elif "other" in operands:
        value = torch.ones_like(operands["other"])
    else:
        return None
    start = value.detach().clone().requires_grad_()
    others = [operands["other"]] if "other" in operands else []
    exponent = recorded.scalars.get("exponent")
    arguments = [exponent] if exponent is not None else others
    function = getattr(torch, name, None)
    if function is None:
        return None
    (gradient,) = torch.autograd.grad(function(start, *arguments).sum(), start)
    return gradient
