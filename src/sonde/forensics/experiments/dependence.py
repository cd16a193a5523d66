"""Dependence: change one part of what the model is called with, and see which outputs move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from sonde.forensics.experiments.program import Change, World
from sonde.forensics.experiments.subject import DoesNotApply, Measured, Subject

MOVED: Final = 1e-9
"""Relative change of an output, in float64, from which it counts as moved."""
_RELATES: Final = frozenset(
    {"index_select", "index", "gather", "scatter_add", "scatter_add_", "index_add", "index_add_", "scatter_reduce"}
    | {"_sparse_mm", "_sparse_addmm", "segment_reduce", "embedding_bag", "_embedding_bag", "cdist", "topk", "scatter"}
)
"""Operations by which a model may relate samples on purpose, as over the edges of a graph."""


def dependence(subject: Subject) -> Measured:
    """Change one sample, one position or one input of the model, in evaluation mode, and see which outputs move.

    Weights are shifted a little at random, so that an output which is independent by chance (a gate that starts at
    zero) is not taken for one that is independent by construction.
    """
    if not subject.model_inputs or not subject.outputs:
        raise DoesNotApply("the tape shows no call of a model whose output reaches the loss")
    bench = _Bench(subject)
    numbers: dict[str, float | None] = {}
    words: dict[str, str] = {}
    text = []
    unused = bench.unused_inputs()
    ignored = [*unused, *bench.ignored_inputs()]
    if ignored:
        words["ignored"] = ", ".join(ignored)
        text.append(f"{words['ignored']} changes no output")
    numbers["inputs"], numbers["ignored"] = float(len(bench.varied) + len(unused)), float(len(ignored))
    mixed = bench.other_samples()
    if mixed is not None:
        numbers["other_samples"] = mixed
        numbers["relates_samples"] = float(bench.relates_samples())
        text.append("other samples change the output" if mixed > MOVED else "samples do not affect each other")
    order = bench.order()
    if order is not None:
        numbers["order"] = order
        text.append("the order of tokens matters" if order > MOVED else "the order of tokens changes no output")
    leak = bench.future()
    if leak is not None:
        numbers["shift"], numbers["future"] = leak
        text.append(
            f"the output at a position depends on the input {leak[0]:.0f} later, which is its target"
            if leak[1] > MOVED
            else "no output sees its target"
        )
    return Measured("; ".join(text) or "every input changes the outputs", numbers, words)


class _Bench:
    """A model with slightly shifted weights, in evaluation mode, whose inputs can be changed."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._double = subject.is_double
        self._world = _shifted(subject.program.world(double=self._double))
        self._before = self._outputs({})
        self.varied = [each for each in subject.model_inputs if self._varies(each)]

    def _content(self, each: int) -> Tensor:
        return self.subject.exact.values[each].detach()

    def _varies(self, each: int) -> bool:
        value = self._content(each)
        return bool(value.dim()) and len(value) > 1 and bool((value != value.roll(1, 0)).any())

    def _outputs(self, values: dict[int, Tensor], *, also: Sequence[int] = ()) -> list[Tensor]:
        change = Change(values=values, eval_mode=True, double=self._double)
        with torch.no_grad():
            done = self.subject.program.repeat(self._world, change)
        return [done.values[each].detach() for each in (*self.subject.outputs, *also)]

    def unused_inputs(self) -> list[str]:
        """Return the names of inputs that differ between samples and from which nothing leads to a loss."""
        given = [each for each in self.subject.data_inputs if each not in self.subject.model_inputs]
        return [self.subject.tape.values[each].name or self._place(each) for each in given if self._varies(each)]

    def ignored_inputs(self) -> list[str]:
        """Return the names of inputs that differ between samples and change no output at all.

        A model that returns its loss takes the labels too: they change that.
        """
        found, losses = [], self.subject.tape.loss_values()
        before = self._outputs({}, also=losses)
        for each in self.varied:
            after = self._outputs({each: self._content(each).roll(1, 0)}, also=losses)
            if all(torch.equal(one, two) for one, two in zip(before, after, strict=True)):
                found.append(self.subject.tape.values[each].name or self._place(each))
        return found

    def _place(self, each: int) -> str:
        for call in self.subject.tape.root_calls():
            for place, value in call.args.items():
                if value == each:
                    return f"argument {place} of {call.kind}"
        return "an input"

    def other_samples(self) -> float | None:
        """Return how far outputs of other samples move if the first sample is changed, relative to its own output."""
        size = self.subject.batch_size
        outputs = [at for at, each in enumerate(self._before) if each.dim() and each.shape[0] == size]
        inputs = [each for each in self.varied if self._content(each).shape[0] == size]
        if size < 2 or not outputs or not inputs:
            return None
        changed = {}
        for each in inputs:
            value = self._content(each).clone()
            value[0] = value[int((value != value[0]).flatten(1).any(1).nonzero()[0])] if value.dim() > 1 else value[1]
            changed[each] = value
        after = self._outputs(changed)
        own = max(float((after[at][0] - self._before[at][0]).abs().max()) for at in outputs)
        others = max(float((after[at][1:] - self._before[at][1:]).abs().max()) for at in outputs)
        return others / own if own > 0 else None

    def relates_samples(self) -> bool:
        """Return whether the model is made to relate samples: it looks things up across them, as over a graph."""
        program, tape = self.subject.program, self.subject.tape
        size = self.subject.batch_size
        computed = self.subject.trained_values | tape.descendants(self.subject.model_inputs)
        before = {tape.values[each].made_by for each in tape.ancestors(self.subject.outputs)}
        for op in program.ops:
            if op.phase == "backward" and op.index in before:
                return True  # an earlier pass of the step has moved the weights
            if op.kind in _RELATES and op.module and op.input("self") in computed:
                return True
        square = (tape.values[each] for each in self.subject.model_inputs)
        return any(each.shape[-2:] == (size, size) and len(each.shape) == 2 for each in square)

    def order(self) -> float | None:
        """Return how far outputs move if the tokens of each sample are reversed, beyond moving with their tokens.

        Only of models that read whole numbers, two dimensions of them: the places of other data may mean nothing.
        """
        for each in self.varied:
            value = self._content(each)
            if value.dim() != 2 or value.is_floating_point() or value.shape[1] <= 2 or value.dtype == torch.bool:
                continue
            if not bool((value != value.flip(1)).any()):
                continue
            moved = []
            for one, two in zip(self._before, self._outputs({each: value.flip(1)}), strict=True):
                there = two.flip(1) if two.dim() > 2 and two.shape[:2] == value.shape else two
                scale = float(one.abs().max())
                moved.append(min(_distance(one, two), _distance(one, there)) / scale if scale > 0 else 0.0)
            return max(moved, default=None)
        return None

    def future(self) -> tuple[float, float] | None:
        """Return by how many positions targets are shifted inputs, and how far an output moves with its own target."""
        for each in self.varied:
            value = self._content(each)
            shift = None if value.dim() < 2 else self._shift(value)
            if shift is None:
                continue
            length = value.shape[1]
            at = length // 2
            other = value.clone()
            other[:, at + shift] = value.roll(1, 0)[:, at + shift]
            if not bool((other != value).any()):
                continue
            moved = self._moved_at(self._outputs({each: other}), value.shape[0], length, at)
            if moved is not None:
                return float(shift), moved
        return None

    def _shift(self, value: Tensor) -> int | None:
        """Return k if the target at each position is the input k positions later."""
        for target in self._target_contents():
            if target.numel() != value.numel():
                continue
            target = target.reshape(value.shape)
            for shift in (1, 2, 3):
                if value.shape[1] > 2 * shift + 2 and _is_shifted(value, target, shift):
                    return shift
        return None

    def _target_contents(self) -> list[Tensor]:
        values = self.subject.exact.values
        found = [values[each].detach() for each in self.subject.targets]
        for op in self.subject.program.ops:
            target = op.input("target")
            if target is not None and target in values and "loss" in op.kind:
                found.append(values[target].detach())
        return found

    def _moved_at(self, after: list[Tensor], size: int, length: int, at: int) -> float | None:
        for one, two in zip(self._before, after, strict=True):
            if one.dim() < 3 or one.shape[0] != size or length not in one.shape[1:]:
                continue
            dim = 1 if one.shape[1] == length else 2
            scale = float((two - one).abs().max())
            moved = float((two.select(dim, at) - one.select(dim, at)).abs().max())
            return moved / scale if scale > 0 else 0.0
        return None


def _distance(one: Tensor, two: Tensor) -> float:
    return float((one - two).abs().max())


def _is_shifted(value: Tensor, target: Tensor, shift: int) -> bool:
    """Return whether the target is the input some positions later, and not also at its own place."""
    later, now = value[:, shift:], target[:, :-shift]
    same = (later == now).double().mean()
    return float(same) > 0.99 and float((value == target).double().mean()) < 0.9


def _shifted(world: World) -> World:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for each in world.parameters.values():
            if each.is_floating_point():
                size = 0.1 * (float(each.square().mean().sqrt()) + 0.1)
                each.add_(size * torch.randn(each.shape, generator=generator, dtype=each.dtype))
    return world
