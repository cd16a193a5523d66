"""The taped step as a program: its operations are executed again, with chosen values changed.

Operations were recorded below autograd, so executing them with autograd on gives the gradients again. Nothing of the
user's code runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from sonde.core.tape import Op, Tape, Value, references
from sonde.forensics.experiments import kernels
from sonde.forensics.experiments.kernels import CannotRepeat

STATE: Final = frozenset({"parameter", "buffer"})


@dataclass(frozen=True, slots=True)
class Change:
    """What is different in a repetition."""

    values: Mapping[int, Tensor] = field(default_factory=dict)
    """By id: what to use instead of a value, saved or computed."""
    dropout: bool = True
    eval_mode: bool = False
    """Run without dropout, and batch norms with their running statistics."""
    redraw: bool = False
    """Draw the masks of dropouts anew instead of using those of the tape."""
    double: bool = False
    """Compute in float64."""


AS_TAPED: Final = Change()


class Repetition:
    """The values of one repetition of the forward pass."""

    def __init__(self, values: dict[int, Tensor], roots: list[int]) -> None:
        self.values = values
        self._roots = roots

    @property
    def losses(self) -> list[Tensor]:
        """What backward was called on, in order."""
        return [self.values[root] for root in self._roots]

    @property
    def loss(self) -> Tensor:
        """The sum of what backward was called on."""
        first, *more = [each.sum() for each in self.losses]
        for each in more:
            first = first + each
        return first


class World:
    """Values that a repetition begins with: parameters, buffers, the batch, constants. Kept from step to step."""

    def __init__(self, values: dict[int, Tensor], parameters: dict[str, Tensor]) -> None:
        self.values = values
        self.parameters = parameters

    def trained(self) -> list[Tensor]:
        """Return the parameters that get gradients."""
        return [each for each in self.parameters.values() if each.requires_grad]


class Program:
    """A taped step that can be repeated.

    Raises:
        CannotRepeat: The tape lacks tensors, or an operation cannot be executed here.

    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        # What torch.autograd.grad was called on is a part of a loss, not a loss.
        marks = [mark for mark in tape.backwards() if "inputs" not in mark.data]
        self.roots = [root for mark in marks for root in references(mark.data.get("roots"))]
        if tape.truncated or tape.incomplete:
            raise CannotRepeat(tape.truncated or tape.incomplete)
        if not self.roots:
            raise CannotRepeat("the taped step has no backward pass")
        self._arguments: dict[int, tuple[list[Any], dict[str, Any]]] = {}
        made = {tape.values[each].made_by for each in tape.ancestors(self.roots)}
        self.ops = [op for op in tape.ops if op.index in made]
        self._tensors = {name: _to_torch(array) for name, array in tape.tensors.items()}
        written = {tape.values[each].storage for op in self.ops for each in op.writes}
        self._written = {value.id for value in tape.given() if value.saved and value.storage in written}
        self._masks = {op.index for op in self.ops if self._is_mask(op)}

    def _is_mask(self, op: Op) -> bool:
        """Return whether an operation draws the mask of a dropout: it is drawn, then scaled by what was kept."""
        if op.name == kernels.FUSED_DROPOUT:
            return True
        if op.name not in kernels.DRAWN_MASKS:
            return False
        return any(each.kind in ("div", "div_") for out in op.outs for each in self.tape.consumers(out))

    @property
    def has_dropout(self) -> bool:
        """Whether the step draws masks of dropouts."""
        return bool(self._masks)

    def after(self, values: Iterable[int]) -> list[Op]:
        """Return the operations of the losses that depend on some values, in order."""
        tape = self.tape
        later = tape.descendants(values) - set(values)
        return [op for op in self.ops if not later.isdisjoint((*op.outs, *op.writes))]

    # ------------------------------------------------------------------ repetition

    def world(self, *, double: bool = False) -> World:
        """Return the values that the step began with; parameters are leaves of autograd."""
        values, parameters = {}, {}
        for value in self.tape.given():
            tensor = self._tensors.get(f"v{value.id}")
            if tensor is None or value.role == "gradient":
                continue
            tensor = tensor.to(torch.float64) if double and tensor.is_floating_point() else tensor.clone()
            tensor = _with_strides(tensor, value)
            if value.role == "parameter" and value.name:  # without a name it belongs to a model that is not watched
                tensor.requires_grad_(value.requires_grad)
                parameters[value.name] = tensor
            values[value.id] = tensor
        return World(values, parameters)

    def saved(self, value: int) -> Tensor | None:
        """Return the content of a value as it was taped, if it was saved."""
        return self._tensors.get(f"v{value}")

    def repeat(self, world: World, change: Change = AS_TAPED, *, keep_buffers: bool = False) -> Repetition:
        """Execute the forward operations again.

        Args:
            world: What to begin with; it is left as it is.
            change: What is different.
            keep_buffers: Whether buffers that the step updates are updated in the world.

        Raises:
            CannotRepeat: An operation failed.

        """
        values = dict(world.values)
        for each in self._written & values.keys():
            values[each] = values[each].clone()
        values.update({each: tensor for each, tensor in change.values.items() if each in values})
        for op in self.ops:
            self._execute(op, values, change)
        if keep_buffers:
            for each in self._written & world.values.keys():
                if self.tape.values[each].role == "buffer":
                    world.values[each] = values[each].detach()
        return Repetition(values, self.roots)

    def resume(self, values: Mapping[int, Tensor], ops: list[Op], change: Change) -> Repetition:
        """Execute some of the operations on values of an earlier repetition, with some values changed."""
        storages = {self.tape.values[each].storage for op in ops for each in op.writes}
        mine = {
            each: tensor.clone() if self.tape.values[each].storage in storages else tensor
            for each, tensor in values.items()
        }
        mine.update(change.values)
        for op in ops:
            self._execute(op, mine, change)
        return Repetition(mine, self.roots)

    def _bound(self, op: Op) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of an operation by position and by name, as the tape has them."""
        if op.index not in self._arguments:
            self._arguments[op.index] = kernels.bind(op.name, op.args)
        return self._arguments[op.index]

    def _execute(self, op: Op, values: dict[int, Tensor], change: Change) -> None:
        positional, by_name = self._bound(op)
        arguments = [self._decode(each, op, values, change) for each in positional]
        named = {name: self._decode(each, op, values, change) for name, each in by_name.items()}
        with contextlib.nullcontext() if op.grad_enabled else torch.no_grad():
            try:
                result = self._call(op, arguments, named, change)
            except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError) as error:
                raise CannotRepeat(f"{op.name} failed when repeated: {str(error).splitlines()[0]}") from error
        outs = [each for each in _flat(result) if isinstance(each, Tensor)]
        for each, tensor in zip(op.outs, outs, strict=False):
            values[each] = change.values.get(each, tensor)

    def _call(self, op: Op, arguments: list[Any], named: dict[str, Any], change: Change) -> Any:
        if op.index in self._masks and (change.eval_mode or not change.dropout):
            return kernels.in_eval_mode(op.name, arguments)
        if op.is_random and not (op.index in self._masks and change.redraw):
            drawn = self._drawn(op, arguments, change)
            if drawn is not None:
                return drawn
        if change.eval_mode:
            arguments = kernels.without_training(op.name, arguments)
        return kernels.find(op.name)(*arguments, **named)

    def _drawn(self, op: Op, arguments: list[Any], change: Change) -> Any:
        """Return what was drawn in the taped step; None if the tape does not hold it."""
        saved = [self._tensors.get(f"v{each}") for each in (op.outs or op.writes)]
        if op.name == kernels.FUSED_DROPOUT:
            mask = saved[1] if len(saved) > 1 else None
            return None if mask is None else (arguments[0] * mask / (1 - arguments[1]), mask)
        if not saved or saved[0] is None:
            return None
        first = saved[0].double() if change.double and saved[0].is_floating_point() else saved[0]
        if op.kind.endswith("_"):
            with torch.no_grad():
                return arguments[0].copy_(first)
        return first.clone()

    def _decode(self, value: Any, op: Op, values: Mapping[int, Tensor], change: Change) -> Any:
        if isinstance(value, list | tuple):
            return [self._decode(each, op, values, change) for each in value]
        if not isinstance(value, dict) or not value:
            return value
        if "v" in value:
            return self._value(int(value["v"]), op, values)
        return _constant(value, double=change.double)

    def _value(self, each: int, op: Op, values: Mapping[int, Tensor]) -> Tensor:
        """Return a value. One that was written to through another view is the tensor that it was before."""
        at = each
        while at >= 0:
            if at in values:
                return values[at]
            at = self.tape.values[at].same_as
        about = self.tape.values[each]
        raise CannotRepeat(f"{op.name} needs a value ({about.role}) of shape {about.shape} that the tape does not hold")

    # ------------------------------------------------------------------ gradients

    def gradients(self, world: World, done: Repetition) -> dict[str, Tensor | None]:
        """Return the gradients of the sum of losses by parameter; None for one that the losses do not reach."""
        trained = {name: each for name, each in world.parameters.items() if each.requires_grad}
        loss = done.loss
        if not loss.requires_grad:
            return dict.fromkeys(trained)
        found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        return dict(zip(trained, found, strict=True))


def _with_strides(tensor: Tensor, value: Value) -> Tensor:
    """Return a tensor laid out in memory as it was: a view that worked then must work again."""
    stride = value.stride
    if stride is None or len(stride) != tensor.dim() or any(step < 1 for step in stride) or not tensor.numel():
        return tensor
    extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, stride, strict=True))
    if extent > 2 * tensor.numel():
        return tensor
    laid_out = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype)
    return laid_out.copy_(tensor)


def _constant(value: dict[str, Any], *, double: bool) -> Any:
    """Return an argument that JSON has no form of."""
    (kind, content), *_ = value.items()
    if kind == "dtype":
        dtype = getattr(torch, str(content), None)
        if not isinstance(dtype, torch.dtype):
            return None
        return torch.float64 if double and dtype.is_floating_point else dtype
    if kind == "float":
        return float(content)
    if kind == "complex":
        return complex(*content)
    if kind in ("layout", "memory_format"):
        found = getattr(torch, str(content), None)
        return found if isinstance(found, torch.layout | torch.memory_format) else None
    return torch.device("cpu") if kind == "device" else None


def _to_torch(array: Any) -> Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view("uint16").copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def _flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [each for part in value for each in _flat(part)]
    return [value]
