"""Repeat a step, kept in memory or read from a bundle, under a trace that leaves the model unchanged."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from sonde.errors import OptionError
from sonde.forensics import permitted
from sonde.forensics.bundle import Bundle, checksums
from sonde.forensics.findings import finding_of
from sonde.forensics.keeper import KeptPass, inputs_of
from sonde.forensics.origin import Origin, origin_of
from sonde.forensics.trace import NotAlone, Operation, Root, Trace, find_root
from sonde.forensics.values import badness
from sonde.hooks.guard import remove_all
from sonde.hooks.names import named_modules, named_parameters
from sonde.hooks.on_backward import replace_gradient
from sonde.hooks.unpack import unpack
from sonde.probes.rerun import eager, recompute, untouched
from sonde.record.kinds import needs_other_ranks
from sonde.records import Finding

# --------------------------------------------------------------------------------
# Repeat a kept pass, forward and backward, under a trace, and leave no trace on the model.


@dataclass(slots=True, eq=False)
class Repetition:
    """The outcome of a repeated pass."""

    kept: KeptPass
    trace: Trace
    outputs: list[tuple[str, Tensor]] = field(default_factory=list)
    gradients: list[tuple[str, Tensor]] = field(default_factory=list)

    def forward_root(self) -> Root | None:
        """Return where the outputs' NaNs and infinities began, or None if they are finite or meant to be infinite."""
        return _first(self.trace, [tensor for _, tensor in self.outputs])

    def backward_root(self) -> Root | None:
        """Return where the gradients' NaNs and infinities began."""
        return _first(self.trace, [tensor for _, tensor in self.gradients])


def repeat_alone(kept: KeptPass, names: dict[int, str], *, backward: bool) -> Repetition | None:
    """Repeat a pass, or return None if one process alone cannot: the others would be left waiting.

    What `needs_other_ranks` does not know is noticed only when it tries, by its operations.
    """
    if not kept.is_alone or needs_other_ranks(kept.model):
        return None
    try:
        return repeat(kept, names, backward=backward)
    except NotAlone:
        kept.is_alone = False
        return None


def repeat(kept: KeptPass, names: dict[int, str], *, backward: bool) -> Repetition:
    """Run a pass once more, as it was: same inputs, random numbers and precision. `names` are by id.

    Sonde's own taps take it for the recomputation of a checkpoint and leave it out. Gradients go nowhere.

    Raises:
        NotAlone: The model was about to talk to other processes.

    """
    model = kept.model
    trace = Trace(names, frozenset({_call_model.__code__, _gradients.__code__}))
    repetition = Repetition(kept, trace)
    args, kwargs = _copies((kept.args, kept.kwargs))
    _give(trace, kept, names, inputs_of(args, kwargs))

    def run() -> None:
        kept.random.put()
        with torch.enable_grad(), kept.precision.scope(), trace.scope():
            repetition.outputs = unpack(_call_model(model, args, kwargs))
            if backward:
                trace.stage = "backward"
                repetition.gradients = _gradients(repetition)

    with _alone(model):
        recompute(run)
    return repetition


@contextlib.contextmanager
def _alone(model: nn.Module) -> Iterator[None]:
    cached = torch.is_autocast_cache_enabled()
    # What torch had to warn of, it has said the first time.
    with warnings.catch_warnings(action="ignore"), eager(model), untouched(model), torch.inference_mode(False):
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(cached)


def _call_model(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # The trace takes those lines for the program's own that lie above this frame.
    return model(*args, **kwargs)


def _gradients(repetition: Repetition) -> list[tuple[str, Tensor]]:
    kept = repetition.kept
    # What is not finite at an output is the loss's doing, or comes about again by itself.
    ends = [
        (tensor, kept.gradients[index])
        for index, (_, tensor) in enumerate(repetition.outputs)
        if index in kept.gradients and tensor.requires_grad and not badness(kept.gradients[index])
    ]
    parameters = [(name, each) for name, each, _ in named_parameters({"": kept.model}) if each.requires_grad]
    if not ends or not parameters:
        return []
    # One output may lead to another, as hidden states do: then its gradient already contains that one's.
    # It is put in place of what arrives there, so that nothing counts twice.
    handles = [replace_gradient(tensor, gradient) for tensor, gradient in ends]
    try:
        found = torch.autograd.grad(
            [tensor for tensor, _ in ends],
            [each for _, each in parameters],
            [gradient for _, gradient in ends],
            allow_unused=True,
        )
    finally:
        remove_all(handles)
    gradients: list[tuple[str, Tensor | None]] = [
        (name, gradient) for (name, _), gradient in zip(parameters, found, strict=True)
    ]
    return [(name, gradient) for name, gradient in gradients if gradient is not None]


def _give(trace: Trace, kept: KeptPass, names: dict[int, str], copies: list[tuple[str, Tensor]]) -> None:
    for name, parameter in kept.model.named_parameters():
        if not isinstance(parameter, nn.parameter.UninitializedParameter):
            trace.give("parameter", names.get(id(parameter), name), parameter)
    for name, buffer in kept.model.named_buffers():
        trace.give("buffer", name, buffer)
    for (name, tensor), (_, copy) in zip(kept.inputs, copies, strict=True):
        trace.give("input", name, tensor, copy)


def _first(trace: Trace, tensors: list[Tensor]) -> Root | None:
    roots = []
    for tensor in tensors:
        if badness(tensor):
            source = trace.source_of(tensor)
            if source is not None:
                roots.append(find_root(source))
    unmeant = [root for root in roots if not root.source.is_intended]
    return min(unmeant, key=_order, default=None)


def _order(root: Root) -> int:
    return root.source.index if isinstance(root.source, Operation) else -1


def _copies(value: Any) -> Any:
    """Return nested inputs with their tensors copied, so that a model that writes into its batch cannot spoil it."""
    if isinstance(value, Tensor):
        copy = value.detach().clone()
        return copy.requires_grad_(value.requires_grad) if copy.is_floating_point() else copy
    if isinstance(value, dict):
        return {key: _copies(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_copies(item) for item in value)
    return value


# --------------------------------------------------------------------------------
# Repeat the step of a bundle, and report whether the same operation goes wrong again.


# How to get an operation's input back from the result that autograd kept.
_INVERSE: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "sqrt": lambda result: result * result,
    "rsqrt": lambda result: 1 / (result * result),
    "reciprocal": lambda result: 1 / result,
    "exp": lambda result: result.log(),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """The outcome of repeating a step."""

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

    The code itself is the program's; but the inputs of the operation are in the bundle. Where the outputs of the model
    come out differently, the operation would have had other inputs.
    """
    operands = {name.removeprefix("operand."): each for name, each in tensors.items() if name.startswith("operand.")}
    if identical is False or not operands:
        return None
    if recorded.stage == "data":
        return recorded if any(badness(each) for each in operands.values()) else None
    result = _backward_of(recorded, operands) if recorded.stage == "backward" else _forward_of(recorded, operands)
    return recorded if result is not None and badness(result) else None


def _forward_of(recorded: Origin, operands: dict[str, Tensor]) -> Tensor | None:
    packet = permitted.packet(recorded.name)
    for name in packet.overloads() if packet is not None else ():  # type: ignore[no-untyped-call] # torch
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
    function = permitted.packet(name)
    if function is None:
        return None
    try:
        (gradient,) = torch.autograd.grad(function(start, *arguments).sum(), start)
    except (AttributeError, RuntimeError, TypeError):  # it takes other arguments, or returns no single tensor
        return None
    return gradient
