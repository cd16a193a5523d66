"""What functions of torch expect of their arguments, compared with what a taped step gave them.

Torch's documentation states these expectations; nothing checks them, and a violation raises no error. They stand in one
table, `CONTRACTS`; `broken` walks the losses of a step and checks all rows of one kind of finding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from sonde.core import signals
from sonde.core.tape import Op, number
from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Found, Threshold, above, fact, on_tape
from sonde.diagnosis.tape.numbers import Numbers
from sonde.diagnosis.tape.ranges import ANYTHING, BOUNDED, Reach, bounded_by, reach
from sonde.diagnosis.tape.reading import LOSS_FUNCTIONS, SOFTMAXES, TapeReading
from sonde.records import Evidence, Severity

_DIFFERENCE: Final = "a difference"
"""The name of a loss that is written by hand as a difference of outputs and targets."""

# --------------------------------------------------------------------------------
# Arguments of losses, and what they must be.


@dataclass(frozen=True, slots=True)
class Argument:
    """What a loss of a taped step was given."""

    reading: TapeReading
    function: str
    role: str
    """`input` or `target`."""
    value: int
    op: Op
    """The operation that returns the loss, or the first one of the call."""
    classes: int | None = None
    """The dimension of classes, where it has one."""
    other: int | None = None
    """What it is compared with."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.reading.tape.values[self.value].shape

    @property
    def numbers(self) -> Numbers | None:
        """Its content, where it is known."""
        return self.reading.numbers.of(self.value)

    @property
    def maker(self) -> Op | None:
        """The operation that computed it."""
        return self.reading.origin(self.value)


@dataclass(frozen=True, slots=True)
class Broken:
    """How an argument differs from what is expected."""

    got: str
    evidence: tuple[Evidence, ...]
    at: Op | None = None
    """The operation to name instead of the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """What some losses expect of an argument."""

    kind: str
    """The finding that a violation is."""
    functions: frozenset[str]
    role: str
    expects: str
    check: Callable[[Argument], Broken | None]
    harm: str
    fix: str
    refute: str = ""
    severity: Severity | None = None


def arguments(reading: TapeReading) -> Iterator[Argument]:
    """Yield the inputs and targets of all losses of torch's that what is minimised depends on."""
    fused = {loss.op.index for loss in reading.losses}
    for loss in reading.losses:
        yield Argument(reading, loss.kind, "input", loss.value, loss.op, loss.classes, loss.target)
        if loss.target is not None:
            yield Argument(reading, loss.kind, "target", loss.target, loss.op, loss.classes, loss.value)
        maker = reading.origin(loss.value) if loss.kind == "nll_loss" else None
        logits = maker.input("self") if maker is not None and maker.kind == "_log_softmax" else None
        if logits is not None:  # the two are a cross entropy
            same = reading.tape.values[logits].shape == reading.tape.values[loss.value].shape
            yield Argument(
                reading, "cross_entropy", "input", logits, loss.op, loss.classes if same else None, loss.target
            )
    for call in calls_of(reading, LOSS_FUNCTIONS):
        if fused.isdisjoint(op.index for op in call.ops):
            yield from _parts(reading, call)
    for op in reading.forward_ops:
        pair = _difference(reading, op)
        if pair is not None:
            yield Argument(reading, _DIFFERENCE, "input", pair[0], op, None, pair[1])


def _difference(reading: TapeReading, op: Op) -> tuple[int, int] | None:
    """Return what was learnt and what was given, of an error that is written by hand and squared or made positive."""
    first, second = op.input("self"), op.input("other")
    # What is drawn from a distribution need not lie within the range of its mean.
    is_of_torch = op.function in LOSS_FUNCTIONS or op.function == "log_prob"
    if op.kind != "sub" or op.module or is_of_torch or first is None or second is None:
        return None
    one, two = (reading.tape.values[each] for each in (first, second))
    if one.shape != two.shape or one.requires_grad == two.requires_grad:
        return None
    uses = {use.kind.removesuffix("_") for use in reading.tape.consumers(op.outs[0]) if use.phase == "forward"}
    return ((first, second) if one.requires_grad else (second, first)) if uses & {"pow", "abs", "square"} else None


def _parts(reading: TapeReading, call: FunctionCall) -> Iterator[Argument]:
    """Yield the input and the target of a loss that torch makes of several operations."""
    values = [reading.tape.values[each] for each in call.given]
    logs = [op.input("self") for op in call.ops if op.kind == "xlogy"]
    learnt = [each.id for each in values if each.requires_grad and each.shape and each.id not in logs]
    data = [each.id for each in values if each.shape and (not each.requires_grad or each.id in logs)]
    if call.function == "kl_div":  # with log_target=True there is no such operation
        data = [each for each in data if each in logs]
    classes = 1 if call.function == "cross_entropy" else None
    for role, given, others in (("input", learnt, data), ("target", data, learnt)):
        for value in given:
            yield Argument(reading, call.function, role, value, call.ops[0], classes, next(iter(others), None))


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of one of torch's functions: its operations, and the values it was given."""

    function: str
    ops: tuple[Op, ...]
    given: tuple[int, ...]


def calls_of(reading: TapeReading, functions: frozenset[str]) -> Iterator[FunctionCall]:
    """Yield the calls of some functions that what is minimised depends on."""
    group: list[Op] = []
    for op in (*reading.forward_ops, None):
        same = op is not None and group and (op.function, op.line) == (group[-1].function, group[-1].line)
        if group and not same:
            made = {out for each in group for out in (*each.outs, *each.writes)}
            given = dict.fromkeys(value for each in group for _, value in each.inputs() if value not in made)
            yield FunctionCall(group[0].function, tuple(group), tuple(given))
            group = []
        if op is not None and op.function in functions:
            group.append(op)


def broken(case: Case, kind: str) -> Found | None:
    """Find an argument of a loss that breaks a contract of the table."""
    answers = (each.once("broken", _first_broken).get(kind) for each in case.rounds)
    return next((answer for answer in answers if answer is not None), None)


def _first_broken(reading: TapeReading) -> dict[str, Found]:
    """Return the first broken contract of each kind."""
    found: dict[str, Found] = {}
    for given in arguments(reading):
        for contract in CONTRACTS:
            if contract.kind in found or given.function not in contract.functions or given.role != contract.role:
                continue
            how = contract.check(given)
            if how is not None:
                found[contract.kind] = _report(given, contract, how)
    return found


def _report(given: Argument, contract: Contract, how: Broken) -> Found:
    at = how.at or given.op
    sites = (given.reading.site(at, signals.LOSS), signals.LOSS) if how.at is not None else (signals.LOSS, "(data)")
    name = f"the {NAMES.get(at.kind, at.kind)} ({at.module})" if at.module else f"the {NAMES.get(at.kind, at.kind)}"
    values = dict.fromkeys(("the_softmax", "the_sigmoid", "the_relu", "the_activation"), name)
    loss = "A loss of differences" if given.function == _DIFFERENCE else given.function
    return Found(
        severity=contract.severity,
        step=given.reading.tape.step,
        sites=tuple(dict.fromkeys(sites)),
        evidence=how.evidence,
        cause=f"{loss} expects {contract.expects}, but gets {how.got}{given.reading.where(at)}: {contract.harm}",
        fix=contract.fix and contract.fix.format_map(values),
        refute=contract.refute,
        values=values,
    )


# --------------------------------------------------------------------------------
# Checks.

NAMES: Final = {
    "_softmax": "softmax", "sigmoid": "sigmoid", "sigmoid_": "sigmoid", "relu": "ReLU", "relu_": "ReLU",
    "threshold": "ReLU", "tanh": "tanh", "tanh_": "tanh", "hardtanh": "hardtanh", "hardtanh_": "hardtanh",
    "clamp": "clamp", "mm": "cosine similarity", "bmm": "cosine similarity",
}  # fmt: skip
_LAYERS: Final = frozenset({"addmm", "mm", "bmm", "baddbmm", "convolution", "linear", "mkldnn_linear", "embedding"})
UNREACHED = Threshold(0.05, "share of targets beyond the range of the outputs: more than single outliers")
BEYOND = Threshold(0.02, "distance of a target beyond the range over the spread of targets: more than rounding")
HELD_UP = Threshold(0.15, "lowest loss that bounded logits allow over that of a guess: tanh before 2 classes has 0.18")
HELD_UP_COSINES = Threshold(0.75, "the same for similarities, which are bounded on purpose: a temperature of 1 has 0.6")
SUM_TOLERANCE = Threshold(1e-2, "difference of a sum of probabilities from 1: float16 rounds less")


def _is_made_by(*kinds: str) -> Callable[[Argument], Broken | None]:
    """Return a check that finds an argument that comes straight from one of some operations."""

    def check(given: Argument) -> Broken | None:
        op = given.maker
        if op is None or op.kind not in kinds or not _is_over_classes(given, op):
            return None
        distance = fact(f"operations from {NAMES.get(op.kind, op.kind)} to the loss", given.op.index - op.index)
        return Broken(f"what a {NAMES.get(op.kind, op.kind)} returned", (distance,), op)

    return check


def _is_over_classes(given: Argument, op: Op) -> bool:
    """Return whether a softmax runs over the classes of a loss; other softmaxes are another fault, or none."""
    if op.kind != "_softmax" or given.classes is None:
        return True
    runs = given.reading.runs_over(op)
    return bool(runs) and runs == given.reading.dim(given.value, given.classes)


def _is_not_logarithm(given: Argument) -> Broken | None:
    op = given.maker
    made = op is not None and (op.kind in (*_LAYERS, *BOUNDED) or _adds_bias(given.reading, op))
    if op is not None and made and reach(given.reading, given.value)[1] > 0:
        name = NAMES.get(op.kind, "layer") if op.kind in BOUNDED else "layer"
        return Broken(f"what a {name} returned", (fact("operations to the loss", given.op.index - op.index),), op)
    numbers = given.numbers if given.function == "kl_div" else None
    if numbers is not None and numbers.size and float(numbers.max()) > SUM_TOLERANCE:
        return Broken(f"numbers up to {numbers.max():.3g}", (above("largest", float(numbers.max()), 0.0),))
    return None


def _adds_bias(reading: TapeReading, op: Op) -> bool:
    """Return whether an operation is the last one of a linear layer whose input has more than two dimensions."""
    return op.kind == "add" and reading.kind_of(op.module) == "Linear"


def _is_outside(low: float, high: float) -> Callable[[Argument], Broken | None]:
    def check(given: Argument) -> Broken | None:
        numbers = given.numbers
        odd = None if numbers is None else numbers[(numbers < low) | (numbers > high)]
        if numbers is None or odd is None or not odd.size or numbers.dtype == np.bool_:
            return None
        ends = (fact("smallest", float(numbers.min())), fact("largest", float(numbers.max())))
        return Broken(f"{numbers.min():g} to {numbers.max():g}", (fact("targets outside", int(odd.size)), *ends))

    return check


def _is_not_sign(given: Argument) -> Broken | None:
    numbers = given.numbers
    odd = np.zeros(0) if numbers is None or numbers.size < 2 else numbers[~np.isin(numbers, (-1, 1))]
    if not odd.size:
        return None
    counts = (fact("targets that are neither -1 nor 1", int(odd.size)), fact("one of them", float(odd.min())))
    return Broken(f"{float(odd.min()):g}", counts)


def _is_blank(given: Argument) -> Broken | None:
    content, op = given.numbers, given.op
    if content is None:
        return None
    blank, lengths = int(op.args.get("blank", 0)), op.input("target_lengths")
    sizes = given.reading.numbers.of(lengths) if lengths is not None else np.asarray(op.args.get("target_lengths"))
    if content.ndim == 2 and sizes is not None:
        content = content[np.arange(content.shape[1]) < np.reshape(sizes, (-1, 1))]
    count = int((content == blank).sum())
    if not count:
        return None
    counts = (fact("labels that are the blank", count), fact("labels", content.size))
    return Broken(f"the number of the blank, {blank}, as a label {count} times", counts)


def _is_too_long(given: Argument) -> Broken | None:
    """Find labels that are longer than the outputs that they are aligned with, repeated ones with a blank between."""
    frames, sizes = (_lengths(given, name) for name in ("input_lengths", "target_lengths"))
    content = given.numbers
    if frames is None or sizes is None or content is None or frames.shape != sizes.shape:
        return None
    rows = list(content) if content.ndim == 2 else np.split(content, np.cumsum(sizes)[:-1])
    needed = np.array([size + (np.diff(row[:size]) == 0).sum() for row, size in zip(rows, sizes, strict=False)])
    count = int((needed > frames[: len(needed)]).sum())
    if not count:
        return None
    counts = (fact("samples whose labels do not fit", count), fact("samples", len(frames)))
    return Broken(f"{count} of {len(frames)} samples with fewer outputs than labels", counts)


def _lengths(given: Argument, name: str) -> Numbers | None:
    value = given.op.input(name)
    found = given.reading.numbers.of(value) if value is not None else given.op.args.get(name)
    return None if found is None else np.asarray(found, dtype=np.int64).reshape(-1)


IGNORED = Threshold(0.05, "share of samples with the label that is ignored: more than single bad labels")


def _ignores_a_class(given: Argument) -> Broken | None:
    """Find a class of samples that ignore_index leaves out; in sequences and pictures it stands for padding."""
    ignored, numbers = number(given.op.args.get("ignore_index", -100)), given.numbers
    source = given.reading.source(given.value)
    classes = None if given.other is None or given.classes is None else given.reading.tape.values[given.other].shape
    if numbers is None or numbers.ndim != 1 or len(source.shape) != 1 or classes is None or given.classes is None:
        return None
    share = float((numbers == ignored).mean())
    if not 0 <= ignored < classes[given.classes] or share < IGNORED or np.unique(numbers).size < 2:
        return None
    return Broken(f"ignore_index={ignored}, which is the label of {share:.0%} of the samples",
                  (above("share of the samples that are ignored", share, IGNORED),))  # fmt: skip


def _is_positive(given: Argument) -> Broken | None:
    """Find rates where the loss expects their logarithm: it takes the exponential of its input."""
    ops = [
        each for each in given.reading.forward_ops if (each.function, each.line) == (given.op.function, given.op.line)
    ]
    taken = any(op.kind == "exp" and given.reading.plain(op.args["self"]["v"]).id == given.reading.plain(given.value).id
                for op in ops)  # fmt: skip
    op = given.maker
    if not taken or op is None or op.kind not in ("exp", "softplus", "relu", "sigmoid") or op in ops:
        return None
    return Broken(f"what {NAMES.get(op.kind, op.kind)} returned", (fact("exponentials in a row", 2),), op)


def _adds_up_to_more(given: Argument) -> Broken | None:
    """Find labels that may be true together where classes exclude each other."""
    numbers, op = given.numbers, None
    classes = given.classes
    if given.function == "binary_cross_entropy":
        op = given.reading.origin(given.other) if given.other is not None else None
        if op is None or op.kind != "_softmax":
            return None
        classes = int(op.args["dim"])
    if numbers is None or classes is None or numbers.ndim < 2 or numbers.dtype.kind not in "fb":
        return None
    most = float(numbers.sum(axis=classes).max())
    if most <= 1 + SUM_TOLERANCE or (numbers < 0).any():
        return None
    sums = (fact("most labels of one sample", most), fact("sum of its outputs", 1.0))
    return Broken(f"samples with up to {most:g} labels", sums, op)


def _has_one_class(given: Argument) -> Broken | None:
    if given.classes is None or len(given.shape) < 2 or given.shape[given.classes] != 1:
        return None
    if given.value not in given.reading.learning:
        return None
    counts = (fact("classes", 1), fact("samples", given.shape[0]))
    return Broken(f"a single output of shape {given.shape}", counts, given.maker)


def _lowest_share(given: Argument, ends: Reach) -> float:
    """Return the lowest loss that logits of a range allow, over that of a guess."""
    width = ends[1] - ends[0]
    if given.function == "binary_cross_entropy_with_logits":
        target = given.reading.numbers.of(given.other) if given.other is not None else None
        share = 0.5 if target is None else float(np.clip(target, 0, 1).mean())
        return float(share * np.logaddexp(0, -ends[1]) + (1 - share) * np.logaddexp(0, ends[0])) / math.log(2)
    classes = given.shape[given.classes] if given.classes is not None else 1
    return math.log1p((classes - 1) * math.exp(-width)) / math.log(classes) if classes > 1 else 0.0


def _is_held_up(given: Argument) -> Broken | None:
    """Find logits within so small a range that the loss cannot become low."""
    ends, op = reach(given.reading, given.value), given.maker
    if op is None or not all(map(math.isfinite, ends)) or op.kind in ("_softmax", "sigmoid", "_log_softmax"):
        return None
    source = bounded_by(given.reading, given.value)
    share, limit = _lowest_share(given, ends), HELD_UP_COSINES if source.kind in ("mm", "bmm", "div") else HELD_UP
    if share < limit:
        return None
    found = above("lowest loss that they allow, over that of a guess", share, limit)
    return Broken(f"numbers that always lie between {ends[0]:.3g} and {ends[1]:.3g}", (found,), source)


def _cannot_be_reached(given: Argument) -> Broken | None:
    """Find targets beyond the range of the outputs that are compared with them."""
    low, high = reach(given.reading, given.value)
    target = given.reading.numbers.of(given.other) if given.other is not None else None
    if (low, high) == ANYTHING or target is None or target.size < 2 or target.dtype.kind not in "fiu":
        return None
    target = np.asarray(target, dtype=np.float64)
    margin = BEYOND * float(target.std())
    share = float(((target < low - margin) | (target > high + margin)).mean())
    if share < UNREACHED or margin == 0:
        return None
    run = (fact("smallest target", float(target.min())), fact("largest target", float(target.max())))
    source = bounded_by(given.reading, given.value)
    got = f"numbers between {low:g} and {high:g} for targets from {target.min():.3g} to {target.max():.3g}"
    return Broken(got, (above("share of targets out of reach", share, UNREACHED), *run), source)


# --------------------------------------------------------------------------------
# The table.


def _of(*functions: str) -> frozenset[str]:
    return frozenset(functions)


_OF_CLASSES: Final = _of("cross_entropy")
_BINARY: Final = _of("binary_cross_entropy_with_logits")
_REGRESSION: Final = _of("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", _DIFFERENCE)
_SIGNS: Final = _of("cosine_embedding_loss", "hinge_embedding_loss", "margin_ranking_loss", "soft_margin_loss")
_TWICE: Final = (
    "the loss applies one itself, so the answers it can distinguish lie between 0 and 1, and it cannot come near 0."
)
CONTRACTS: Final = (
    Contract(kind="double_softmax", functions=_OF_CLASSES, role="input", expects="logits",
             check=_is_made_by("_softmax", "sigmoid"), harm=_TWICE, fix=""),
    Contract(kind="double_sigmoid", functions=_BINARY, role="input", expects="logits",
             check=_is_made_by("_softmax", "sigmoid"), harm=_TWICE, fix=""),
    Contract(kind="relu_before_logits", functions=_OF_CLASSES | _BINARY, role="input", expects="logits of both signs",
             check=_is_made_by("relu", "relu_", "threshold"), fix="",
             harm="no answer can be ruled out, and classes whose logit is 0 get no gradient."),
    Contract(kind="logits_into_prob_loss", functions=_of("nll_loss", "ctc_loss", "kl_div"), role="input",
             expects="log-probabilities", check=_is_not_logarithm,
             harm="no logarithm of a softmax was taken, so the loss has no floor.",
             fix="Apply log_softmax over the classes first."),
    Contract(kind="logits_into_prob_loss", functions=_of("kl_div"), role="target", expects="probabilities",
             check=_is_outside(0.0, 1.0 + SUM_TOLERANCE), harm="the distance has no meaning, and may be negative.",
             fix="Pass probabilities, or log-probabilities with log_target=True.",
             refute="Print the smallest and largest target: if they lie between 0 and 1, this finding is wrong."),
    Contract(kind="single_class_output", functions=_OF_CLASSES, role="input", expects="one output per class",
             check=_has_one_class, fix="",
             harm="a softmax over one class is always 1, so the loss is constant and nothing is learnt."),
    Contract(kind="label_out_of_range", functions=_BINARY, role="target", expects="targets from 0 to 1",
             check=_is_outside(0.0, 1.0), harm="beyond them the loss has no floor, and outputs grow without end.",
             fix="Scale the targets to 0 ... 1, as in mask / 255 or (x + 1) / 2.",
             refute="Print target.min() and target.max(): if they lie between 0 and 1, this finding is wrong."),
    Contract(kind="label_out_of_range", functions=_SIGNS, role="target", expects="targets -1 and 1", check=_is_not_sign,
             harm="pairs with another target have no loss, or the wrong one.",
             fix="Map the targets to -1 and 1, as in 2 * target - 1.",
             refute="Print target.unique(): if it holds -1 and 1 only, this finding is wrong."),
    Contract(kind="label_out_of_range", functions=_of("ctc_loss"), role="target", expects="labels other than the blank",
             check=_is_blank, harm="such a label cannot be distinguished from silence.",
             fix="Count labels from 1 and leave 0 to the blank, or set blank to a number that no label has.",
             refute="Print (targets == blank).sum() within the target lengths: if it is 0, this finding is wrong."),
    Contract(kind="samples_left_out", functions=_of("ctc_loss"), role="target", expects="no more labels than outputs",
             check=_is_too_long, harm="no alignment exists, so their loss is infinite, or 0 with zero_infinity.",
             fix="Use a smaller stride, repeat frames, or drop these samples; check the unit of input_lengths.",
             refute="Compare input_lengths with target_lengths: if none is smaller, this finding is wrong."),
    Contract(kind="samples_left_out", functions=_OF_CLASSES | _of("nll_loss"), role="target",
             expects="a label for every sample that counts", check=_ignores_a_class,
             harm="no sample of this class is learnt from.",
             fix="Remove ignore_index, or set it to a number that is not a class.",
             refute="Train on samples of this class alone: if the loss is not NaN or 0, this finding is wrong."),
    Contract(kind="output_range_mismatch", functions=_of("poisson_nll_loss"), role="input",
             expects="the logarithm of a rate (log_input=True)", check=_is_positive,
             harm="the exponential is taken twice, so rates grow out of reach.",
             fix="Return the scores of the last layer, or pass log_input=False.",
             refute="Print log_input: if it is False, this finding is wrong."),
    Contract(kind="output_range_mismatch", functions=_OF_CLASSES | _of("binary_cross_entropy"), role="target",
             expects="probabilities that add up to 1", check=_adds_up_to_more, severity="critical",
             harm="the outputs add up to 1, so labels that are not exclusive cannot be high together.",
             fix="Use a sigmoid for each label: binary_cross_entropy_with_logits of the scores before the softmax.",
             refute="Print target.sum(1).max(): if it is 1, this finding is wrong."),
    Contract(kind="output_range_mismatch", functions=_OF_CLASSES | _BINARY, role="input", expects="logits of any size",
             check=_is_held_up, harm="however sure the model is, the loss cannot become low.",
             fix="Leave the outputs unbounded; divide similarities by the temperature, do not multiply.",
             refute="Print the range of the logits over some batches: if it is far wider, this finding is wrong."),
    Contract(kind="output_range_mismatch", functions=_REGRESSION, role="input", expects="outputs near the targets",
             check=_cannot_be_reached, harm="some targets can never be reached.",
             fix="End in a linear layer without {the_activation}, or scale the targets into its range."),
)  # fmt: skip
"""What losses expect of their arguments, as torch documents it."""


_UNSIGNED: Final = ("uint8", "uint16", "uint32", "uint64")


@on_tape
def wrapped_around(reading: TapeReading) -> Found | None:
    """Find a subtraction of unsigned integers whose result would be negative."""
    for op in reading.tape.ops:
        if op.kind.removesuffix("_") not in ("sub", "rsub") or op.phase in ("backward", "optimizer"):
            continue
        first, out = op.input("self"), op.outs[0]
        if first is None or reading.tape.values[out].dtype not in _UNSIGNED or out not in reading.needed:
            continue
        second = op.input("other")
        one = reading.numbers.of(first)
        two = reading.numbers.of(second) if second is not None else np.asarray(op.args.get("other"))
        if one is None or two is None:
            continue
        if op.kind.startswith("rsub"):
            one, two = two, one
        wrapped = int((one.astype(np.int64) < two.astype(np.int64)).sum())
        if wrapped:
            size = reading.tape.values[out].size
            return Found(
                sites=("(data)",),
                evidence=(fact("numbers that wrap around", wrapped), fact("numbers", size)),
                cause=f"{wrapped / size:.0%} of the numbers wrap around{reading.where(op)}: "
                f"{reading.tape.values[out].dtype} "
                "has no negative numbers, and a subtraction below 0 ends near its largest.",
                fix="Convert to float before subtracting: x.float() - mean.",
                refute="Print the dtype on that line: if it is signed or a float, this finding is wrong.",
            )
    return None


# --------------------------------------------------------------------------------
# Samples that a model makes.


@on_tape
def samples_out_of_reach(reading: TapeReading) -> Found | None:
    """Find samples of a model whose last activation cannot reach the data that a judge compares them with."""
    for call, other in itertools.permutations(reading.tape.root_calls(), 2):
        if call.path != other.path or len(call.args) != 1 or len(other.args) != 1:
            continue
        made, real = next(iter(call.args.values())), next(iter(other.args.values()))
        low, high = reach(reading, made)
        is_pair = made in reading.of_weights and real not in reading.of_weights
        content = reading.numbers.of(real) if is_pair and (low, high) != ANYTHING else None
        if content is None or content.dtype.kind != "f" or content.shape[1:] != reading.tape.values[made].shape[1:]:
            continue
        outside = float(((content < low - MARGIN) | (content > high + MARGIN)).mean())
        op = reading.tape.producer(reading.plain(made).id)
        if outside >= OUT_OF_REACH and op is not None and op.in_model:
            return Found(
                sites=(reading.site(op, "(model)"), "(model)", "(data)"),
                evidence=(above("share of the data that samples cannot reach", outside, OUT_OF_REACH),),
                cause=f"Samples of the model lie between {low:g} and {high:g}, but {outside:.0%} of the numbers of the "
                f"data that {call.path} compares them with do not: they lie between {content.min():.3g} and "
                f"{content.max():.3g}.",
                fix="End the model in an activation with the range of the data (tanh for -1 to 1), or scale the data.",
                refute="Print the smallest and largest number of both: if the ranges agree, this finding is wrong.",
            )
    return None


OUT_OF_REACH = Threshold(0.2, "share of numbers: a few outliers of the data need not be reached")
MARGIN = Threshold(0.01, "distance from the range: sigmoids and tanh come close to their ends")

# --------------------------------------------------------------------------------
# Attention.


@on_tape
def multiplied_scores(reading: TapeReading) -> Found | None:
    """Find attention whose scores are multiplied by the root of the number of features instead of divided by it."""
    for op in reading.forward_ops:
        product, factor = _scores(reading, op) if op.kind in SOFTMAXES else (None, 1.0)
        queries = None if product is None else product.input("self")
        features = 0 if queries is None else reading.tape.values[queries].shape[-1]
        if product is None or features < LEAST_FEATURES or abs(factor * factor / features - 1) > SAME_FACTOR:
            continue
        if all(reading.tape.values[each].requires_grad for _, each in product.inputs()):
            return Found(
                sites=(reading.site(op, "(model)"),),
                evidence=(fact("factor of the scores", factor), fact("features of a query", features)),
                cause=f"Attention scores are multiplied by {factor:.4g}, the root of the {features} features of a query"
                f"{reading.where(op)}, instead of divided by it: they are {features} times too large, so each row "
                "attends to one position.",
                fix=f"Divide the scores: (queries @ keys.transpose(-2, -1)) / math.sqrt({features}).",
                refute="Print the spread of the scores before the softmax: if it is about 1, this finding is wrong.",
            )
    return None


def _scores(reading: TapeReading, softmax: Op) -> tuple[Op | None, float]:
    """Return the product of queries and keys that a softmax is taken of, and the number that it is multiplied by."""
    value, factor = softmax.input("self"), 1.0
    for _ in range(_MOST_BETWEEN):
        op = None if value is None else reading.tape.producer(reading.plain(value).id)
        if op is None or op.kind in ("bmm", "mm"):
            return op, factor
        by = number(op.args.get("other")) if op.kind in ("mul", "div") and op.input("other") is None else None
        if op.kind not in ("add", "masked_fill") and not by:
            break
        factor *= 1 / by if by and op.kind == "div" else by or 1.0
        value = op.input("self")
    return None, factor


LEAST_FEATURES = Threshold(4, "features of a query: the root of fewer may be another number by chance")
SAME_FACTOR = Threshold(1e-3, "square of the factor over the number of features, from 1: a root that was rounded")
_MOST_BETWEEN: Final = 8
"""Operations between scores and their softmax."""
