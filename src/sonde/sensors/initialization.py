"""Sensors for the values that parameters begin with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import Parameter

from sonde.core.signals import ROW_SPREAD, UNIT_GRADIENT
from sonde.hooks.names import named_parameters
from sonde.schedule import at, every, first
from sonde.sensors.sensor import Context, Sensor, Step
from sonde.sensors.tensors import is_plain, is_real, sample_columns

# Reading this much takes about a tenth of a second. Small parameters are always looked at.
BUDGET_BYTES: Final = 512 << 20
ALWAYS_BYTES: Final = 1 << 16
LAST_SPREAD: Final = 20
"""The last step in which the spread of rows is looked at."""
# Weights larger than this cost more to read than their rows are worth.
MAX_BYTES: Final = 64 << 20


class InitialValues(Sensor):
    """Constants, equal rows, and copies of each other among the parameters before training."""

    produces = ("facts.parameters",)
    when = at(0)
    cost = "reads up to 512 MB of parameters, once, and waits for them"

    def start(self) -> None:
        """Compare the parameters."""
        named = [(name, each) for name, each, _ in named_parameters(dict(self.context.watched.models))]
        self.context.book.add_values({name: asdict(values) for name, values in look_at(named).items()})


@dataclass(slots=True, eq=False)
class _Rows:
    name: str
    parameter: Parameter
    reached: Tensor | None = None
    complete: bool = False


class _WeightRows(Sensor):
    """Looks at the rows of weights of two or more dimensions."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._rows: dict[int, _Rows] = {}

    def start(self) -> None:
        """Choose the weights that have rows."""
        for name, parameter in self.context.module_parameters():
            if is_real(parameter) and parameter.dim() > 1 and len(parameter) > 1 and parameter.nbytes <= MAX_BYTES:
                self._rows[id(parameter)] = _Rows(name, parameter)

    def _chosen(self, parameters: list[Parameter]) -> list[_Rows]:
        return [rows for each in parameters if (rows := self._rows.get(id(each))) is not None]


class RowSpread(_WeightRows):
    """How the rows of weights differ: units that are all the same learn the same. Counts an optimizer's steps."""

    produces = (ROW_SPREAD,)
    when = at(0, 1, 5, LAST_SPREAD)
    cost = "one pass over at most 256 rows of each weight"

    def on_initial(self) -> None:
        """Look before the first step."""
        self._see(list(self._rows.values()))

    def on_step(self, step: Step) -> None:
        """Look after a step of the schedule."""
        if step.number <= LAST_SPREAD and step.due and self.when(step.number):
            self._see(self._chosen(step.parameters))

    @torch.no_grad()
    def _see(self, chosen: list[_Rows]) -> None:
        for rows in chosen:
            weight = sample_columns(rows.parameter)
            whole = weight.std(correction=0)
            between = weight.var(0, correction=0).mean().sqrt()
            self.signals.see(rows.name, ROW_SPREAD, (between / whole).where(whole > 0, 0))


class RowGradients(_WeightRows):
    """Which units (rows) of a weight ever had a gradient. Counts an optimizer's steps."""

    produces = (UNIT_GRADIENT,)
    # What happened to no unit in fifty steps is looked for less often.
    when = (every(10, offset=5) & first(51)) | every(100, offset=5)
    cost = "one pass over the gradients of weights; on the CPU no more once every row had one"

    @torch.no_grad()
    def on_gradients(self, step: Step) -> None:
        """Look at the gradients of a step of the schedule."""
        if not step.due or not self.when(step.number):
            return
        for rows in self._chosen(step.parameters):
            grad = rows.parameter.grad
            if grad is not None and is_plain(grad):
                self._see_gradient(rows, grad)

    def _see_gradient(self, rows: _Rows, grad: Tensor) -> None:
        if rows.complete:
            return  # it stays so, and has been written
        now = torch.linalg.vector_norm(grad.detach().flatten(1), math.inf, dim=1) != 0
        before = rows.reached
        rows.reached = now if before is None or before.device != now.device else before | now
        # Reading an answer waits on a device, but not on the CPU.
        rows.complete = now.device.type == "cpu" and bool(rows.reached.all())
        self.signals.see(rows.name, UNIT_GRADIENT, rows.reached)


@dataclass(slots=True, eq=False)
class ValueFacts:
    """What was found about one parameter; all is false where it was not looked at."""

    constant: bool = False
    zero: bool = False
    equal_rows: bool = False
    equal_to: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class _Looked:
    name: str
    tensor: Tensor
    numbers: tuple[float, ...]
    """Smallest, largest, a weighted sum, and whether the first two rows are the same."""


@torch.no_grad()
def look_at(parameters: Sequence[tuple[str, Parameter]]) -> dict[str, ValueFacts]:
    """Compare parameters by name, within a budget of bytes."""
    looked = _fingerprints(_within_budget(parameters))
    found = {each.name: _judge(each) for each in looked}
    groups: dict[object, list[_Looked]] = {}
    for each in looked:
        # Zeros and ones are alike without having been copied.
        if not found[each.name].constant:
            key = (tuple(each.tensor.shape), each.tensor.dtype, each.tensor.device, each.numbers)
            groups.setdefault(key, []).append(each)
    for group in groups.values():
        for each in group if len(group) > 1 else ():
            twins = (other for other in group if other is not each and torch.equal(other.tensor, each.tensor))
            found[each.name].equal_to = tuple(other.name for other in twins)
    return found


def _within_budget(parameters: Sequence[tuple[str, Parameter]]) -> list[tuple[str, Tensor]]:
    left = BUDGET_BYTES
    chosen = []
    for name, parameter in parameters:
        if not is_real(parameter) or not parameter.numel():
            continue
        if parameter.nbytes <= ALWAYS_BYTES or parameter.nbytes <= left:
            left -= parameter.nbytes
            chosen.append((name, parameter.detach()))
    return chosen


def _fingerprints(chosen: list[tuple[str, Tensor]]) -> list[_Looked]:
    numbers: dict[torch.device, list[Tensor]] = {}
    for _, tensor in chosen:
        numbers.setdefault(tensor.device, []).append(_fingerprint(tensor))
    # One wait per device, not one per parameter.
    rows = {device: iter(torch.stack(some).to("cpu")) for device, some in numbers.items()}
    return [_Looked(name, tensor, tuple(float(x) for x in next(rows[tensor.device]))) for name, tensor in chosen]


def _fingerprint(tensor: Tensor) -> Tensor:
    low, high = torch.aminmax(tensor)
    total = tensor.sum(dtype=torch.float32)
    rows = tensor[:2].flatten(1) if tensor.dim() > 1 and len(tensor) > 1 else None
    same = (rows[0] == rows[1]).all() if rows is not None else torch.zeros_like(low)
    return torch.stack([low.float(), high.float(), total.float(), same.float()])


def _judge(each: _Looked) -> ValueFacts:
    low, high, _, same = each.numbers
    constant = low == high and each.tensor.numel() > 1
    rows = each.tensor.flatten(1) if each.tensor.dim() > 1 else None
    equal_rows = bool(same) and rows is not None and bool((rows == rows[:1]).all())
    return ValueFacts(constant=constant, zero=low == 0 == high, equal_rows=equal_rows)
