"""What an experiment works on: the taped step, where to cut it, and tools that several experiments share."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from sonde.core.examination import Number, number
from sonde.core.tape import Op, Tape
from sonde.forensics.experiments.kernels import CannotRepeat
from sonde.forensics.experiments.program import Change, Program, Repetition

AFFINE: Final = frozenset({"addmm", "mm", "bmm", "baddbmm", "addbmm", "convolution", "linear", "_addmm_activation"})
UNBOUNDED: Final = 1e6
"""A loss that falls below minus this many times its start has no minimum."""


class DoesNotApply(Exception):
    """Raised by an experiment that this step offers nothing for; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The outcome of an experiment."""

    said: str
    numbers: Mapping[str, float | None] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)

    def plain_numbers(self) -> dict[str, Number]:
        """Return the numbers as they are stored."""
        return {name: number(value) for name, value in self.numbers.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Lowest:
    """How far a loss falls if a part of the step is replaced by free numbers."""

    start: float
    loss: float
    values: tuple[Tensor, ...]
    gradient: float
    """The norm of the gradient at the start."""

    @property
    def is_unbounded(self) -> bool:
        """Whether the loss has no bottom."""
        return self.loss < -UNBOUNDED * (1 + abs(self.start)) or math.isnan(self.loss)


@dataclass(frozen=True, slots=True)
class Scale:
    """The loss of the best answer that ignores the inputs, and the lowest loss of all; None where unknown."""

    guess: float | None = None
    floor: float | None = None

    def skill(self, loss: float) -> float | None:
        """Return 0 for the loss of a guess, 1 for the lowest; None where these are unknown or the same."""
        if self.guess is None or self.floor is None or self.guess - self.floor <= 1e-6 * max(abs(self.guess), 1e-12):
            return None
        return (self.guess - loss) / (self.guess - self.floor) if math.isfinite(loss) else -math.inf

    def level(self, skill: float) -> float:
        """Return the loss with some skill; below everything where that is unknown."""
        if self.guess is None or self.floor is None:
            return -math.inf
        return self.guess - skill * (self.guess - self.floor)


class Subject:
    """A taped step under examination, with a deadline."""

    def __init__(self, tape: Tape, *, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.tape = tape
        self.program = Program(tape)
        self._clock = clock
        self._deadline = clock() + seconds

    def left(self) -> float:
        """Return the seconds that are left."""
        return self._deadline - self._clock()

    # ------------------------------------------------------------------ the step as it was

    @functools.cached_property
    def exact(self) -> Repetition:
        """The step as taped, in float64 where all operations have it, without gradients."""
        return self._exact[0]

    @property
    def is_double(self) -> bool:
        """Whether `exact` is in float64."""
        return self._exact[1]

    @functools.cached_property
    def _exact(self) -> tuple[Repetition, bool]:
        with torch.no_grad():
            try:
                return self.program.repeat(self.program.world(double=True), Change(double=True)), True
            except CannotRepeat:
                return self.program.repeat(self.program.world()), False

    # ------------------------------------------------------------------ cuts

    @functools.cached_property
    def trained_values(self) -> set[int]:
        """All values that depend on a parameter."""
        return self.tape.descendants([each.id for each in self.tape.given("parameter")])

    @functools.cached_property
    def outputs(self) -> list[int]:
        """Real-valued outputs of whole models that a loss depends on; not a loss that a model returns itself."""
        found = []
        for each in self.tape.outputs_of_root():
            value = self.tape.values[each]
            if value.dtype.startswith(("float", "bfloat")) and value.size > 1 and each in self.trained_values:
                found.append(each)
        # Where models are called one after the other, what the last ones return.
        return [each for each in found if not (self.tape.descendants(each) - {each}) & set(found)]

    @functools.cached_property
    def scores(self) -> list[int]:
        """What the last layers with weights computed, before any activation."""
        made = [op for op in self.program.ops if op.kind in AFFINE and self._has_weights(op)]
        last = []
        for op in made:
            later = self.tape.descendants(op.outs) - set(op.outs)
            if not any(later & set(other.outs) for other in made):
                last += [each for each in op.outs[:1] if self.tape.values[each].size > 1]
        return last

    def _has_weights(self, op: Op) -> bool:
        sources = {source for _, each in op.inputs() for source in (each, *self._behind_views(each))}
        return any(self.tape.values[each].role == "parameter" for each in sources)

    def _behind_views(self, value: int) -> list[int]:
        """Return what a value is a view or a cast of."""
        found = []
        maker = self.tape.producer(value)
        while maker is not None and maker.kind in _VIEWS:
            before = maker.input("self")
            if before is None:
                break
            found.append(before)
            maker = self.tape.producer(before)
        return found

    @functools.cached_property
    def loss_inputs(self) -> list[int]:
        """What the last function of torch for losses got from the model, if the program calls one."""
        ops = [op for op in self.program.ops if op.function in LOSS_FUNCTIONS and op.grad_enabled]
        if not ops:
            return []
        last = ops[-1]
        group = [op for op in ops if (op.function, op.line) == (last.function, last.line)]
        made = {each for op in group for each in (*op.outs, *op.writes)}
        found = dict.fromkeys(each for op in group for _, each in op.inputs() if each not in made)
        return [each for each in found if each in self.trained_values and self.tape.values[each].size > 1]

    @functools.cached_property
    def model_inputs(self) -> list[int]:
        """Data that models were called with and a loss depends on: tensors of more than one element."""
        used = self.tape.ancestors(self.program.roots)
        return [each for each in self.data_inputs if each in used]

    @functools.cached_property
    def data_inputs(self) -> list[int]:
        """Data that models were called with, given or computed from what was given; not what another model returned."""
        found = (each for each in self.tape.inputs_of_root() if each in self.exact.values)
        return [
            each
            for each in found
            if each not in self.trained_values and self.tape.values[each].shape and self.tape.values[each].size > 1
        ]

    @functools.cached_property
    def targets(self) -> list[int]:
        """What the loss gets beside the outputs, one entry or row per sample: tensors, given or computed."""
        cut = self.scores or self.outputs
        beside = dict.fromkeys(each for op in self.program.after(cut) for _, each in op.inputs())
        found = []
        for each in beside:
            value = self.tape.values[each]
            is_data = value.role == "target" or value.shape[:1] == (self.batch_size,)
            if each in self.exact.values and each not in self.trained_values and value.size > 1 and is_data:
                found.append(each)
        made = self.tape.descendants(found) - set(found)
        return [each for each in found if each not in made]

    @functools.cached_property
    def batch_size(self) -> int:
        """The length of the first dimension that most of the model's inputs share; 0 if there are none."""
        sizes = [self.tape.values[each].shape[0] for each in self.model_inputs]
        return max(set(sizes), key=sizes.count) if sizes else 0

    def content(self, value: int) -> Tensor:
        """Return what a value held in the taped step, in the type it had."""
        dtype = getattr(torch, self.tape.values[value].dtype, None)
        found = self.exact.values[value].detach()
        return found.to(dtype) if isinstance(dtype, torch.dtype) else found

    # ------------------------------------------------------------------ tools

    def lowest(self, cut: Sequence[int], *, same_for_all: bool = False, steps: int = 60) -> Lowest:
        """Minimise the loss over the values at a cut, all else as taped.

        Args:
            cut: Ids of values.
            same_for_all: Whether all samples get the same values, as a guess that ignores the inputs would give.
            steps: How many evaluations each of two methods may use, about.

        """
        base, ops = self.exact.values, self.program.after(cut)
        start = [base[each].detach().clone() for each in cut]
        free = [torch.zeros_like(each[:1]) if same_for_all else each.clone() for each in start]
        change = functools.partial(Change, double=self.is_double)

        def loss_of(values: Sequence[Tensor]) -> Tensor:
            whole = [each.expand_as(old) if same_for_all else each for each, old in zip(values, start, strict=True)]
            return self.program.resume(base, ops, change(values=dict(zip(cut, whole, strict=True)))).loss

        found = minimise(loss_of, free, steps=steps, may_go_on=lambda: self.left() > 0)
        if found.gradient == 0 or found.is_unbounded:
            return found
        # Units that are off at the start get no gradient: begin once more where they are on.
        raised = [each + 1 + each.abs().mean() for each in free]
        again = minimise(loss_of, raised, steps=steps // 2, may_go_on=lambda: self.left() > 0)
        return replace(again, start=found.start, gradient=found.gradient) if again.loss < found.loss else found

    @functools.cached_property
    def scale(self) -> Scale:
        """Where losses of this step lie between a guess and the lowest possible one."""
        cut, size = self.scores or self.outputs, self.batch_size
        rows = [self.tape.values[each].shape[:1] for each in cut]
        if not cut or size < 2 or any(not row or row[0] % size for row in rows):
            return Scale()
        lowest, guess = self.lowest(cut), self.lowest(cut, same_for_all=True, steps=30)
        if lowest.gradient == 0 or lowest.is_unbounded or guess.is_unbounded:
            return Scale()
        return Scale(guess.loss, lowest.loss)

    def agreement(self, values: Sequence[Tensor]) -> tuple[str, float] | None:
        """Return how well outputs match the targets: ("accuracy" or "correlation", value); None if not comparable."""
        for tensor in values:
            for target in self.targets:
                found = agreement(tensor.detach(), self.content(target))
                if found is not None:
                    return found
        return None


def minimise(
    loss_of: Callable[[Sequence[Tensor]], Tensor],
    start: Sequence[Tensor],
    *,
    steps: int,
    may_go_on: Callable[[], bool] = lambda: True,
) -> Lowest:
    """Minimise a function of tensors from a start, by L-BFGS and then by Adam, and return the lowest that was seen."""
    free = [each.detach().clone().requires_grad_() for each in start]
    best: list[tuple[float, list[Tensor]]] = []

    def evaluate() -> Tensor:
        for each in free:
            each.grad = None
        loss = loss_of(free)
        value = float(loss.detach())
        if math.isfinite(value) and (not best or value < best[0][0]):
            best[:] = [(value, [each.detach().clone() for each in free])]
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call] # torch
        return loss

    first = float(evaluate().detach())
    norm = math.sqrt(sum(float(each.grad.square().sum()) for each in free if each.grad is not None))
    if norm > 0 and math.isfinite(norm) and best:
        _by_lbfgs(free, evaluate, steps, first)
        _by_adam(free, evaluate, steps, may_go_on, best)
    value, found = best[0] if best else (math.nan, [each.detach() for each in free])
    return Lowest(first, value, tuple(found), norm)


def _by_lbfgs(free: list[Tensor], evaluate: Callable[[], Tensor], steps: int, first: float) -> None:
    optimizer = torch.optim.LBFGS(free, max_iter=steps, max_eval=2 * steps, line_search_fn="strong_wolfe")
    try:
        optimizer.step(evaluate)  # type: ignore[no-untyped-call] # torch
    except (RuntimeError, CannotRepeat, IndexError, ValueError):
        return  # a loss that is not defined everywhere, such as a logarithm


def _by_adam(
    free: list[Tensor],
    evaluate: Callable[[], Tensor],
    steps: int,
    may_go_on: Callable[[], bool],
    best: list[tuple[float, list[Tensor]]],
) -> None:
    scale = max(float(max(each.abs().max() for each in best[0][1])), 1.0)
    for rate in (0.1 * scale, 0.01 * scale):
        with torch.no_grad():
            for each, value in zip(free, best[0][1], strict=True):
                each.copy_(value)
        optimizer = torch.optim.Adam(free, lr=rate)
        for _ in range(steps):
            if not may_go_on():
                return
            try:
                evaluate()
            except (RuntimeError, CannotRepeat, IndexError, ValueError):
                return
            if any(each.grad is None or not bool(each.grad.isfinite().all()) for each in free):
                return
            optimizer.step()


def agreement(output: Tensor, target: Tensor) -> tuple[str, float] | None:
    """Return how well an output matches a target: the share of right classes, or a correlation; None if neither fits.

    >>> agreement(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1]))
    ('accuracy', 1.0)
    """
    if not target.is_floating_point() and target.dtype != torch.bool:
        shape = tuple(output.shape)
        for dim in dict.fromkeys((1, len(shape) - 1)):
            if len(shape) > dim > 0 and shape[:dim] + shape[dim + 1 :] == tuple(target.shape) and shape[dim] > 1:
                return _accuracy(output.argmax(dim), target, shape[dim])
        if len(shape) == 2 and shape[0] == target.numel() and shape[1] > 1:
            return _accuracy(output.argmax(1), target.flatten(), shape[1])
    one, two = output.flatten().double(), target.flatten().double()
    if one.numel() != two.numel() or tuple(output.squeeze().shape) != tuple(target.squeeze().shape):
        return None
    one, two = one - one.mean(), two - two.mean()
    scale = float(one.norm() * two.norm())
    return ("correlation", float((one * two).sum()) / scale) if scale > 0 else None


def _accuracy(found: Tensor, target: Tensor, classes: int) -> tuple[str, float] | None:
    valid = (target >= 0) & (target < classes)
    if not bool(valid.any()) or not bool((target[valid] != target[valid].flatten()[0]).any()):
        return None
    return "accuracy", float((found == target)[valid].double().mean())


_VIEWS: Final = frozenset({"t", "transpose", "view", "permute", "_to_copy", "alias", "expand", "unsqueeze", "detach"})
LOSS_FUNCTIONS: Final = frozenset(
    {"cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"}
    | {"binary_cross_entropy", "binary_cross_entropy_with_logits", "gaussian_nll_loss", "poisson_nll_loss"}
    | {"hinge_embedding_loss", "multilabel_soft_margin_loss", "multi_margin_loss", "soft_margin_loss", "ctc_loss"}
)
