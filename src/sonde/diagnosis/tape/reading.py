"""What a taped step computes, as rules ask for it: its losses, the terms of what is minimised, and where gradients end.

Everything here is an exact relation between the operations of one step; see `sonde.core.tape`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from sonde.core import tape as tapes
from sonde.core.tape import Mark, Op, Tape, Value, number, references
from sonde.diagnosis.tape.axes import Dim, Labels, label
from sonde.diagnosis.tape.numbers import TapedNumbers
from sonde.errors import RunDamaged, RunNotFound

T = TypeVar("T")
CARRIERS: Final = frozenset(
    {"view", "_unsafe_view", "reshape", "_reshape_alias", "permute", "transpose", "t", "squeeze", "unsqueeze", "expand"}
    | {"slice", "select", "narrow", "index", "index_select", "clone", "contiguous", "_to_copy", "alias", "unbind"}
    | {"split", "split_with_sizes", "chunk", "lift_fresh"}
)
"""Operations that pass numbers on as they are: all of them, or some, in the same or in another shape."""
RESHAPING: Final = frozenset(
    {"view", "_unsafe_view", "reshape", "_reshape_alias", "squeeze", "unsqueeze", "contiguous", "clone", "_to_copy"}
    | {"detach", "alias", "lift_fresh", "expand"}
)
"""Operations after which all numbers are still there, in the same order."""
SOFTMAXES: Final = ("_softmax", "_safe_softmax")
_LOSSES: Final = {
    "mse_loss": "mse_loss",
    "smooth_l1_loss": "smooth_l1_loss",
    "huber_loss": "huber_loss",
    "binary_cross_entropy": "binary_cross_entropy",
    "binary_cross_entropy_with_logits": "binary_cross_entropy_with_logits",
}
_SYMMETRIC: Final = ("mse_loss", "smooth_l1_loss", "huber_loss")

LOSS_FUNCTIONS: Final = frozenset(
    {"cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "ctc_loss"}
    | {"binary_cross_entropy", "binary_cross_entropy_with_logits", "gaussian_nll_loss", "poisson_nll_loss"}
    | {"cosine_embedding_loss", "hinge_embedding_loss", "margin_ranking_loss", "triplet_margin_loss"}
    | {"multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss", "soft_margin_loss"}
)
"""Functions of torch that compare outputs with targets, as `Op.function` names them."""


@dataclass(frozen=True, slots=True)
class TapedLoss:
    """A call of one of torch's losses."""

    kind: str
    """`cross_entropy`, `nll_loss`, `mse_loss`, ...: torch's functional name."""
    op: Op
    """The operation that returns the loss."""
    value: int
    """Its input."""
    target: int | None
    classes: int | None = None
    """The dimension of classes, where it has one."""


@dataclass(frozen=True, slots=True)
class Term:
    """A number that is added to what is minimised."""

    value: int
    sign: int = 1
    """1 or -1: whether it is minimised or maximised."""
    divided: bool = False
    """Whether it was divided by a number on the way."""
    factor: float = 1.0
    """The number that it was multiplied by on the way, without its sign."""


class TapeReading:
    """Answers about one tape. Each is found once."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self._answers: dict[str, Any] = {}

    def once(self, name: str, ask: Callable[[TapeReading], T]) -> T:
        """Return the answer to a question, which is asked once."""
        if name not in self._answers:
            self._answers[name] = ask(self)
        answer: T = self._answers[name]
        return answer

    @functools.cached_property
    def labels(self) -> Labels:
        """Which axes of the data the dimensions of values run over."""
        return label(self.tape)

    @functools.cached_property
    def numbers(self) -> TapedNumbers:
        """The contents of values, as far as they were saved or can be computed of what was."""
        return TapedNumbers(self.tape)

    @functools.cached_property
    def roots(self) -> tuple[int, ...]:
        """What is minimised.

        A gradient that is only a part of a loss, as in a gradient penalty, does not count, nor beside a backward pass
        one that was asked for inputs, as for an attack or to draw samples from an energy.
        """
        backwards = self.tape.backwards()
        last = [mark for mark in backwards if not mark.data.get("create_graph")] or backwards
        held = set(self.held.values())
        trained = [mark for mark in last if held & {*references(mark.data.get("inputs"))} or not _asks(mark)]
        last = trained or last
        return tuple(dict.fromkeys(root for mark in last for root in references(mark.data.get("roots"))))

    @functools.cached_property
    def losses_at(self) -> frozenset[str]:
        """The lines that computed what is minimised, which distinguish the kinds of rounds of a loop."""
        lines = {str(self.tape.line_of(self.tape.producer(root))) for root in self.roots}
        return frozenset(lines)

    @functools.cached_property
    def differentiated(self) -> frozenset[int]:
        """All that a backward pass or `torch.autograd.grad` was called on, parts of a loss included."""
        return frozenset(root for mark in self.tape.backwards() for root in references(mark.data.get("roots")))

    @functools.cached_property
    def needed(self) -> frozenset[int]:
        """All values that what is minimised depends on, also through numbers that left torch and came back."""
        found = self.tape.ancestors(self.roots)
        return frozenset(found | self.tape.ancestors([of for value, of in self.came_back.items() if value in found]))

    @functools.cached_property
    def came_back(self) -> dict[int, int]:
        """Tensors that were made anew of the numbers of others, as by `torch.tensor(x.tolist())`, with these others.

        Nothing else uses the other one, and both have the same numbers. Where these are not known, because layers are
        not computed again, the new tensor must be what comes next, with the same shape.
        """
        last = [
            value
            for value in self.tape.values
            if not value.is_given and value.size > 1 and not self.tape.consumers(value.id) and self._is_learnt(value)
        ]
        found: dict[int, int] = {}
        for value in self.tape.given("constant") if last else ():
            uses = [use for use in self.tape.consumers(value.id) if use.phase == "forward"]
            content = self.tape.tensor(value.id) if value.saved and uses and value.dtype.startswith("float") else None
            if content is None:
                continue
            for other in last:
                between = uses[0].index - other.made_by
                if other.shape != value.shape or between < 1:
                    continue
                numbers = self.numbers.of(other.id)
                is_same = between == 1 if numbers is None else np.allclose(numbers, content, rtol=1e-4, atol=1e-6)
                if is_same and uses[0].module == self.tape.ops[other.made_by].module:
                    found[value.id] = other.id
        return found

    def _is_learnt(self, value: Value) -> bool:
        """Return whether a gradient could pass the operation that made a value, on to something that takes one."""
        op = self.tape.producer(self.plain(value.id).id)  # behind a detach
        if op is None or op.phase != "forward" or not self.tape.is_differentiable(op):
            return False
        return any(self.tape.values[each].requires_grad for _, each in op.inputs())

    @functools.cached_property
    def learning(self) -> frozenset[int]:
        """All values that pass a gradient of what is minimised on."""
        return frozenset(self.tape.ancestors(self.roots, through=self.tape.is_differentiable))

    @functools.cached_property
    def learnt(self) -> frozenset[int]:
        """All values through which a gradient could reach a parameter that an optimizer holds, used or not."""
        held = [value for value in self.held.values() if self.tape.values[value].requires_grad]
        return frozenset(self.tape.descendants(held, through=self.tape.is_differentiable))

    @functools.cached_property
    def forward_ops(self) -> tuple[Op, ...]:
        """The operations whose results what is minimised depends on."""
        needed = self.needed
        return tuple(
            op for op in self.tape.ops if op.phase == "forward" and not needed.isdisjoint((*op.outs, *op.writes))
        )

    # ------------------------------------------------------------------ where values come from

    def origin(self, value: int) -> Op | None:
        """Return the operation that computed the numbers of a value, whatever was done to their shape since."""
        return self.tape.producer(self.source(value).id)

    def makers(self, values: int | Iterable[int], through: Callable[[Op], bool] | None = None) -> list[Op]:
        """Return the operations that made values, and all that these depend on."""
        found = (self.tape.producer(each) for each in self.tape.ancestors(values, through=through))
        return [op for op in found if op is not None]

    def source(self, value: int) -> Value:
        """Return the value whose numbers a value holds, whatever was done to their shape since."""
        return self.plain(value, CARRIERS)

    def plain(self, value: int, through: frozenset[str] = RESHAPING) -> Value:
        """Return the value that another holds the numbers of, in the same order."""
        op = self.tape.producer(value)
        while op is not None and op.kind in through and (before := op.input("self")) is not None:
            value = before
            op = self.tape.producer(value)
        return self.tape.values[value]

    def unscaled(self, value: int, through: frozenset[str] = CARRIERS) -> tuple[Value, float]:
        """Return what a value is a multiple of, whatever was done to its shape since, and by which number."""
        factor = 1.0
        op = self.tape.producer(value)
        while op is not None and (before := op.input("self")) is not None:
            kind, by = op.kind.removesuffix("_"), number(op.args.get("other"))
            if kind in ("mul", "div") and isinstance(by, int | float) and by:
                factor *= by if kind == "mul" else 1 / by
            elif kind == "neg":
                factor = -factor
            elif kind not in through:
                break
            value, op = before, self.tape.producer(before)
        return self.tape.values[value], factor

    def pair(self, op: Op) -> tuple[int, int] | None:
        """Return the two tensors that an operation combines element by element."""
        first, second = op.input("self"), op.input("other")
        return None if first is None or second is None else (first, second)

    def dim(self, value: int, place: int) -> Dim:
        """Return the axes of one dimension of a value, counted from either end."""
        label = self.labels.get(value)
        return self.labels.axes.join(label[place]) if label else ()

    def runs_over(self, op: Op) -> Dim:
        """Return the axes that a softmax runs over."""
        value = op.input("self")
        return () if value is None else self.dim(value, int(op.args["dim"]))

    def where(self, op: Op | Mark | None) -> str:
        """Return the user's line of an operation in words: ` (train.py:12: loss = ...)`; empty if it is not known."""
        line = self.tape.line_of(op)
        return "" if line is None else f" ({line}: `{line.text}`)" if line.text else f" ({line})"

    def site(self, op: Op, outside: str) -> str:
        """Return the module of an operation, or what to name for one outside all modules."""
        return op.module or outside

    def kind_of(self, module: str) -> str:
        """Return the class of a module; empty for what is outside all of them."""
        return self._kinds.get(module, "")

    @functools.cached_property
    def _kinds(self) -> dict[str, str]:
        return {module.path: module.kind for module in self.tape.modules}

    def unread(self, module: str) -> dict[str, str]:
        """Return the arguments that a module's `forward` never reads: by name and by place, their names."""
        names: dict[str, str] = {}
        name = ""
        for each in self._unread.get(module, ()):
            name = name if each.startswith("[") else each
            names[each] = name
        return names

    @functools.cached_property
    def _unread(self) -> dict[str, tuple[str, ...]]:
        return {module.path: module.unread for module in self.tape.modules if module.unread}

    def is_policy_ratio(self, op: Op) -> bool:
        """Return whether an operation is exp(new - old) of something learnt and something that is not, as in PPO."""
        value = op.input("self")
        before = None if op.kind != "exp" or value is None else self.tape.producer(value)
        new, old = (None, None) if before is None else (before.input("self"), before.input("other"))
        if before is None or before.kind != "sub" or new is None or old is None:
            return False
        return self.tape.values[new].requires_grad and not self.tape.values[old].requires_grad

    def makes_targets(self, module: str) -> bool:
        """Return whether what is minimised depends on a call of a module without gradients, as of a teacher."""
        ops = self.tape.ops_of(module)
        return any(not op.grad_enabled and not self.needed.isdisjoint((*op.outs, *op.writes)) for op in ops)

    @functools.cached_property
    def is_one_sequence(self) -> bool:
        """Whether models are called with one sequence of tokens, so that there is no axis of samples."""
        learned = self.tape.descendants([value.id for value in self.tape.given("parameter")])
        values = [self.tape.values[each] for each in self.tape.inputs_of_root() if each not in learned]
        return bool(values) and all(len(each.shape) == 1 and each.dtype.startswith("int") for each in values)

    @functools.cached_property
    def takes_random_rows(self) -> bool:
        """Whether models are called with rows of a larger set, taken in an order that goes up and down.

        Rows that only go up may be pieces of long sequences that continue in the next step. A table that is read at
        labels or tokens is not a set of samples.
        """
        inputs = self.tape.ancestors(self.tape.inputs_of_root())
        for op in self.tape.ops:
            chosen = [each for name in ("indices", "index") for each in references(op.args.get(name))]
            if op.kind not in ("index", "index_select") or op.module or len(chosen) != 1 or not inputs & set(op.outs):
                continue
            rows = None if self.tape.values[chosen[0]].role in _DATA else self.numbers.of(chosen[0])
            if rows is not None and rows.dtype.kind in "iu" and rows.ndim == 1 and len(rows) > MIN_ROWS:
                return not bool((np.diff(rows) >= 0).all() or (np.diff(rows) <= 0).all())
        return False

    def count_samples(self) -> int:
        """Return how many samples the step has; 0 if that is not known."""
        axes = self.labels.axes
        return max((axes.sizes[each] for each in axes.samples), default=self._rows)

    @functools.cached_property
    def _rows(self) -> int:
        """The first dimension that all data has which models are called with, and all that they return; 0 if none."""
        values = [*self.tape.inputs_of_root(), *self.tape.outputs_of_root()]
        firsts = {self.tape.values[each].shape[:1] for each in values}
        first = firsts.pop() if len(firsts) == 1 else ()
        return first[0] if first and first[0] > 1 else 0

    # ------------------------------------------------------------------ losses

    @functools.cached_property
    def losses(self) -> tuple[TapedLoss, ...]:
        """The calls of torch's losses that what is minimised depends on."""
        return tuple(loss for op in self.forward_ops if (loss := self._loss(op)) is not None)

    def compared(self) -> Iterator[tuple[int, int, Op]]:
        """Yield what is compared in losses, also those written by hand as a difference: output, target, operation."""
        for loss in self.losses:
            if loss.target is not None:
                yield loss.value, loss.target, loss.op
        for op in self.forward_ops:
            first, second = op.input("self"), op.input("other")
            if op.module or op.kind != "sub" or first is None or second is None:
                continue
            pair = [self.tape.values[each] for each in (first, second)]
            if pair[0].shape == pair[1].shape and pair[0].requires_grad != pair[1].requires_grad:
                output, target = pair if pair[0].requires_grad else pair[::-1]
                yield output.id, target.id, op

    def is_bootstrap(self, target: int) -> bool:
        """Return whether a target is data plus something of what a model returned."""
        op = self.tape.producer(self.plain(target).id)
        parts = [] if op is None or op.kind != "add" else [value for _, value in op.inputs()]
        return len(parts) == 2 and sum(each in self.of_weights for each in parts) == 1

    @functools.cached_property
    def of_weights(self) -> set[int]:
        """All values that were computed of weights."""
        weights = [value.id for value in self.tape.given() if value.role == "parameter" or value.requires_grad]
        return self.tape.descendants(weights)

    @functools.cached_property
    def fetched_ahead(self) -> frozenset[int]:
        """The tensors of batches that a loader has returned ahead: another step uses them."""
        found: set[int] = set()
        for mark in self.tape.marks:
            values = mark.data.get("values") if mark.kind == "loader_next" else None
            batch = (
                [value for each in values.values() for value in references(each)] if isinstance(values, dict) else []
            )
            if not any(op.kind != "lift_fresh" for value in batch for op in self.tape.consumers(value)):
                found.update(batch)
        return frozenset(found)

    @functools.cached_property
    def has_moving_target(self) -> bool:
        """Whether a target moves with what is learnt, as values of next states do: then the loss need not fall."""
        return any(self.is_bootstrap(target) for _, target, _ in self.compared())

    @functools.cached_property
    def has_own_targets(self) -> bool:
        """Whether a target is made of what is trained, or of a state that the step updates, such as a moving average.

        Then the loss may rise from nothing: outputs and their targets begin close together.
        """
        written = {self.tape.values[value].storage for op in self.tape.ops for value in op.writes}
        own = {value.id for value in self.tape.given() if value.storage in written} | {*self.held.values()}
        targets = [target for _, target, _ in self.compared()]
        return any(not own.isdisjoint(self.tape.ancestors(target)) for target in targets)

    def _loss(self, op: Op) -> TapedLoss | None:
        value, target = op.input("self"), op.input("target")
        if op.kind == "_ctc_loss" and (given := op.input("log_probs")) is not None:
            return TapedLoss("ctc_loss", op, given, op.input("targets"), 2)
        if value is None:
            return None
        if op.kind in _LOSSES:
            learns = [each is not None and self.tape.values[each].requires_grad for each in (value, target)]
            if op.kind in _SYMMETRIC and target is not None and learns == [False, True]:
                value, target = target, value  # the order does not matter, and many programs put the target first
            return TapedLoss(_LOSSES[op.kind], op, value, target)
        if op.kind in ("nll_loss_forward", "nll_loss2d_forward"):
            before = self.origin(value)
            given = None if before is None else before.input("self")
            if before is not None and before.function == "cross_entropy" and given is not None:
                return TapedLoss("cross_entropy", op, given, target, int(before.args["dim"]))
            return TapedLoss("nll_loss", op, value, target, 1 if len(self.tape.values[value].shape) > 1 else 0)
        return None

    @functools.cached_property
    def terms(self) -> tuple[Term, ...]:
        """What is added up to what is minimised, with its sign."""
        return tuple(term for root in self.roots for term in self.terms_of(root))

    def terms_of(self, root: int) -> list[Term]:
        """Return what is added up to one number."""
        return self._terms(Term(root, self.direction(root)), 64)

    def direction(self, root: int) -> int:
        """Return -1 for what backward is given a negative gradient for, which is maximised; else 1."""
        for mark in self.tape.backwards():
            roots, given = (references(mark.data.get(name)) for name in ("roots", "gradients"))
            if root in roots and len(given) == len(roots):
                content = self.numbers.of(given[roots.index(root)])
                return -1 if content is not None and content.size and float(content.max()) < 0 else 1
        return 1

    def _terms(self, term: Term, most: int) -> list[Term]:
        op = self.tape.producer(term.value)
        first = None if op is None else op.input("self")
        if op is None or first is None or most <= 0 or self.tape.values[term.value].size != 1:
            return [term]
        kind, second, within = op.kind.removesuffix("_"), op.input("other"), replace(term, value=first)
        if kind in ("add", "sub"):
            turn = _sign(op.args.get("alpha", 1)) * (1 if kind == "add" else -1)
            other = [] if second is None else [replace(term, value=second, sign=term.sign * turn)]
            return [found for each in (within, *other) for found in self._terms(each, most // 2)]
        if kind in ("neg", "rsub"):
            return self._terms(replace(within, sign=-term.sign), most - 1)
        if kind in ("mul", "div") and second is None:
            sign, by = term.sign * _sign(op.args.get("other", 1)), number(op.args.get("other", 1))
            size = abs(by) if isinstance(by, int | float) and by else 1.0
            factor = term.factor * (size if kind == "mul" else 1 / size)
            return self._terms(
                replace(within, sign=sign, divided=term.divided or kind == "div", factor=factor), most - 1
            )
        return self._terms(within, most - 1) if kind in CARRIERS else [term]

    def holds(self, term: Term) -> list[TapedLoss]:
        """Return torch's losses that a term is made of by nothing but averaging, adding up and scaling."""
        inside = self.tape.ancestors(term.value, through=_is_averaging)
        return [loss for loss in self.losses if loss.op.outs and loss.op.outs[0] in inside]

    def over_samples(self, term: Term) -> str | None:
        """Return how a term was made of the numbers of samples: `mean`, `sum`, or None if that is unknown.

        A sum that is divided by something later counts as a mean.
        """
        ways = self._ways_back(term.value)
        found = {_reduction(op) for op in ways if self._ends_samples(op)}
        if len(found) != 1:
            return None
        only = found.pop()
        divided = term.divided or any(op.kind == "div" for op in ways)
        return "mean" if only == "sum" and divided else only

    def _ways_back(self, value: int) -> list[Op]:
        """Return the operations that led from numbers with samples to this one without."""
        found: dict[int, Op] = {}
        waiting = [value]
        while waiting and len(found) < 256:
            at = waiting.pop()
            op = self.tape.producer(at)
            if op is None or op.index in found:
                continue
            if at in op.writes and self.tape.values[at].requires_grad and not op.grad_enabled:
                continue  # a parameter, whatever an optimizer computed its last step of
            found[op.index] = op
            if not self._ends_samples(op):
                waiting += [each for _, each in op.inputs() if not self.has_samples(each)]
        return list(found.values())

    def has_samples(self, value: int) -> bool:
        """Return whether a value has numbers for each sample; where samples are not known, whether rows are as many."""
        if self.labels.axes.samples:
            return any(self.labels.axes.has_samples(dim) for dim in self.labels.get(value))
        return self._rows > 0 and self.tape.values[value].shape[:1] == (self._rows,)

    def is_samples(self, value: int, place: int) -> bool:
        """Return whether a dimension of a value counts the samples; where samples are not known, the first one."""
        if self.labels.axes.samples:
            return self.labels.axes.has_samples(self.dim(value, place))
        return place == 0 and self.has_samples(value)

    def _ends_samples(self, op: Op) -> bool:
        return any(self.has_samples(value) for _, value in op.inputs())

    # ------------------------------------------------------------------ gradients

    @functools.cached_property
    def held(self) -> dict[str, int]:
        """The parameters that optimizers hold and that were used in the step, by name."""
        return {
            name: value
            for optimizer in self.tape.optimizers
            for group in optimizer.groups
            for name, value in zip(group.names, group.parameters, strict=False)
            if value >= 0
        }

    def cut_parameters(self) -> list[str]:
        """Return the held parameters that a gradient should reach and does not.

        These are those that what is minimised depends on; all that were used, if no gradient reaches any.
        """
        lost = {name: value for name, value in self.held.items() if self.learning.isdisjoint(self._contents(value))}
        if len(lost) == len(self.held):
            return [name for name, value in lost.items() if self.tape.consumers(value)]
        return [name for name, value in lost.items() if value in self.needed]

    def _contents(self, value: int) -> list[int]:
        """Return a value and what its tensor became when it was written to, as weights are that a program clips."""
        found = [value]
        for each in found:
            found += self.tape.becomes(each)
        return found

    def comes_first(self, names: list[str]) -> bool:
        """Return whether parameters are used on data alone and leave torch nowhere, as those of a feature extractor."""
        trained = self.tape.descendants([value for value in self.held.values() if value in self.learning])
        uses = [op for name in names if name in self.held for op in self.tape.consumers(self.held[name])]
        return not self.came_back and all(value not in trained for op in uses for _, value in op.inputs())

    def cut_off(self, parameters: set[int]) -> Op | None:
        """Return the operation at which the gradient of some parameters ends, though the loss depends on them."""
        carried: set[int] = set(parameters)
        for op in self.tape.ops:
            if op.phase not in ("forward", "between") or not any(value in carried for _, value in op.inputs()):
                continue
            made = (*op.outs, *op.writes)
            if self.tape.is_differentiable(op):
                carried.update(made)
            elif any(out in self.needed for out in made):
                return op
        back = [value for value, other in self.came_back.items() if other in carried]
        return self.tape.consumers(back[0])[0] if back else None


_DATA: Final = frozenset({"input", "target", "batch"})
MIN_ROWS: Final = 3
"""A list of fewer rows has no meaningful order."""
MAX_OPS: Final = 20_000
"""A longer tape is not read while a run goes on: it would take too much of the training's time."""


class Shelf:
    """Returns the tapes of a run, each once."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._read: set[Path] = set()

    def __call__(self) -> list[Tape]:
        """Return the tapes that were written since the last call; one that cannot be read is left out."""
        found: list[Tape] = []
        for folder in self._unread():
            self._read.add(folder)
            with suppress(RunDamaged, RunNotFound):
                found.append(tapes.read(folder))
        return [tape for tape in found if len(tape.ops) <= MAX_OPS]

    def unread_bytes(self) -> int:
        """Return the size of the tapes that the next call reads."""
        found = 0
        for folder in self._unread():
            with suppress(OSError):
                found += (folder / tapes.INFO).stat().st_size
        return found

    def _unread(self) -> list[Path]:
        return [folder for folder in tapes.folders(self._run).values() if folder not in self._read]


def _sign(factor: object) -> int:
    value = number(factor)
    return -1 if isinstance(value, int | float) and value < 0 else 1


def _reduction(op: Op) -> str | None:
    """Return how an operation makes one number of many."""
    reduction = op.args.get("reduction")
    if reduction in (1, 2):
        return "mean" if reduction == 1 else "sum"
    return op.kind if op.kind in ("mean", "sum") else None


def _is_averaging(op: Op) -> bool:
    kind = op.kind.removesuffix("_")
    return kind in ("mean", "sum", "mul", "div", "stack", "cat") or kind in CARRIERS


def _asks(mark: Mark) -> bool:
    """Return whether a backward pass was made for the gradients of certain tensors, which it did not leave in them."""
    return bool(references(mark.data.get("inputs")))
