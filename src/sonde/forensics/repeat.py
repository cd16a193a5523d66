"""Repeat a kept pass, forward and backward, under a trace, and leave no trace on the model."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sonde.forensics.keeper import KeptPass, inputs_of
from sonde.forensics.trace import NotAlone, Operation, Root, Trace, find_root
from sonde.forensics.values import badness
from sonde.hooks.guard import remove_all
from sonde.hooks.names import named_parameters
from sonde.hooks.on_backward import replace_gradient
from sonde.hooks.unpack import unpack
from sonde.probes.rerun import eager, recompute, untouched
from sonde.record.kinds import needs_other_ranks


@dataclass(slots=True, eq=False)
class Repetition:
    """What came of a repeated pass."""

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
    # One output may lead to another, as hidden states do: then its gradient holds what came through that one already.
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
