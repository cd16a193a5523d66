"""What a taped step shows of losses: which operation made their input, how shapes broadcast, and which terms they sum.

Rules of `sonde.diagnosis.rules` call these first: an operation that is on the tape needs no statistics.
"""

from __future__ import annotations

import functools
import math
from math import prod
from typing import Final

from sonde.core import signals
from sonde.core.tape import Mark, Op, number
from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Found, Threshold, above, fact, few, on_first_tape, on_tape
from sonde.diagnosis.tape.axes import Cut, reduced
from sonde.diagnosis.tape.contracts import arguments
from sonde.diagnosis.tape.numbers import Numbers
from sonde.diagnosis.tape.reading import CARRIERS, LOSS_FUNCTIONS, RESHAPING, SOFTMAXES, TapeReading, Term

_PAIRWISE: Final = frozenset({"sub", "add", "mul", "div", "rsub", "pow", "maximum", "minimum"})


@on_tape
def wrong_axis(reading: TapeReading) -> Found | None:
    """Find a softmax that runs over the samples, or over another axis than the classes of its loss."""
    return (
        _not_over_classes(reading)
        or _over_two_axes(reading)
        or _over_samples(reading)
        or _over_one(reading)
        or _over_positions(reading)
    )


def _over_positions(reading: TapeReading) -> Found | None:
    """Find a loss that takes positions of the data for classes, and units of the last layer for positions."""
    for index, at in reading.labels.crossed:
        op = reading.tape.ops[index]
        value = op.input("self")
        shape = () if value is None else reading.tape.values[value].shape
        if value is not None and value in reading.learning:
            return Found(
                sites=(signals.LOSS, "(loop)"),
                evidence=(fact("positions taken for classes", shape[1]), fact("units taken for positions", shape[at])),
                cause=f"The loss takes the positions of its input for classes, and the units of the last layer for "
                f"positions{reading.where(op)}: the classes belong into dimension 1.",
                fix="Write logits.transpose(1, 2) or permute; view and reshape keep the order of numbers. "
                "Or flatten: cross_entropy(logits.flatten(0, 1), target.flatten()).",
                refute="Multiply the logits of one position by 2: if the loss of all others stays, this finding is "
                "wrong.",
            )
    return None


def _over_one(reading: TapeReading) -> Found | None:
    """Find attention weights of a softmax over a dimension of size 1, which are always 1.

    A loop that attends to one step first and to more later meets more in the same tape. Products of queries and keys
    are left out: there may be a single key to attend to.
    """
    sizes: dict[tuple[str, int], set[int]] = {}
    for op in reading.forward_ops:
        value = op.input("self") if op.kind in SOFTMAXES else None
        shape = () if value is None else reading.tape.values[value].shape
        if len(shape) > 2 and value in reading.learnt and not _is_of_pairs(reading, value):
            sizes.setdefault((op.module, op.line), set()).add(shape[int(op.args["dim"])])
    for op in reading.forward_ops:
        value = op.input("self") if sizes.get((op.module, op.line)) == {1} and op.kind in SOFTMAXES else None
        if value is not None and sum(size > 1 for size in reading.tape.values[value].shape) > 1:
            return _crossed(reading, op, "that dimension has one element, so that all results are 1")
    return None


@on_tape
def softmax_of_one(reading: TapeReading) -> Found | None:
    """Find an output that is the softmax of a single number of each sample, which is always 1."""
    for loss in reading.losses:
        maker = reading.origin(loss.value)
        value = maker.input("self") if maker is not None and maker.kind in (*SOFTMAXES, "_log_softmax") else None
        shape = () if value is None else reading.tape.values[value].shape
        if maker is None or value not in reading.learnt or len(shape) < 2 or shape[int(maker.args["dim"])] != 1:
            continue
        return Found(
            sites=tuple(dict.fromkeys((reading.site(maker, "(model)"), signals.LOSS))),
            evidence=(fact("classes that the softmax runs over", 1),),
            cause=f"A softmax of {shape} runs over a dimension with one element{reading.where(maker)}: every answer is "
            "1, whatever goes in, and nothing is learnt.",
            fix="Use a sigmoid for one output, or give the last layer one output per class.",
        )
    return None


def _is_of_pairs(reading: TapeReading, value: int) -> bool:
    """Return whether scores are products of two values, scaled, masked and reshaped since."""
    through = frozenset({*CARRIERS, "mul", "div", "add", "masked_fill", "where"})
    makers = reading.makers(value, lambda op: op.kind.removesuffix("_") in through and not _adds_weights(reading, op))
    return any(op.kind in ("bmm", "baddbmm") for op in makers)


def _adds_weights(reading: TapeReading, op: Op) -> bool:
    return any(reading.tape.values[value].role == "parameter" for value in _both(op))


@on_tape
def lost_in_norm(reading: TapeReading) -> Found | None:
    """Find a norm over a single number: whatever goes in, its bias comes out."""
    for op in reading.forward_ops:
        value = op.input("input")
        if op.kind not in ("native_layer_norm", "native_group_norm") or value is None or value not in reading.learnt:
            continue
        about = reading.tape.values[value]
        over = op.args.get("normalized_shape") or about.shape[1:]
        groups = int(op.args.get("group", 1)) if op.kind == "native_group_norm" else 1
        if prod(over) // groups == 1 and about.size > 1:
            return Found(
                severity="critical",
                sites=(reading.site(op, "(model)"), "(model)"),
                evidence=(fact("numbers that are normalised together", 1),),
                cause=f"{op.module or 'A norm'} normalises every number by itself{reading.where(op)}: a number "
                "minus its own mean is 0, so its output is the same for all inputs, and nothing before it learns.",
                fix="Normalise over several features; give GroupNorm fewer groups than channels.",
                refute="Print the output for two samples: if they differ, this finding is wrong.",
                exact=True,
            )
    return None


def _not_over_classes(reading: TapeReading) -> Found | None:
    for loss in reading.losses:
        maker = reading.origin(loss.value)
        if loss.kind not in ("nll_loss", "ctc_loss") or maker is None or loss.classes is None:
            continue
        if maker.kind not in (*SOFTMAXES, "_log_softmax"):
            continue
        runs, classes = reading.runs_over(maker), reading.dim(loss.value, loss.classes)
        place = _place_of_softmax(reading, loss.value)
        is_known = place is not None or (runs and classes)
        if is_known and (place != loss.classes if place is not None else runs != classes):
            return _crossed(reading, maker, "the classes of the loss are in another dimension")
    return None


def _over_two_axes(reading: TapeReading) -> Found | None:
    """Find probabilities that are compared with others which add up to one over another dimension."""
    pairs = [(output, target) for output, target, _ in reading.compared()]
    pairs += [
        (each.value, each.other) for each in arguments(reading) if each.role == "input" and each.other is not None
    ]
    pairs += [pair for op in reading.forward_ops if (pair := _cross_entropy(reading, op)) is not None]
    for pair in pairs:
        places = [_place_of_softmax(reading, each) for each in pair]
        shapes = [reading.tape.values[each].shape for each in pair]
        makers = [op for each in pair if (op := reading.origin(each)) is not None]
        if None not in places and places[0] != places[1] and shapes[0] == shapes[1] and len(makers) == 2:
            wrong = makers[0 if reading.is_samples(pair[0], int(places[0] or 0)) else 1]
            return _crossed(reading, wrong, "what it is compared with adds up to one over another dimension")
    return None


def _cross_entropy(reading: TapeReading, op: Op) -> tuple[int, int] | None:
    """Return probabilities and logarithms of others that are multiplied; two softmaxes are multiplied on purpose."""
    pair = reading.pair(op) if op.kind == "mul" and not op.in_model else None
    makers = [] if pair is None else [reading.origin(each) for each in pair]
    return pair if sum(maker is not None and maker.kind == "_log_softmax" for maker in makers) == 1 else None


def _place_of_softmax(reading: TapeReading, value: int) -> int | None:
    """Return the dimension of a value over which its probabilities add up to one; None if it is not of a softmax."""
    after: list[Op] = []
    op = reading.tape.producer(value)
    while op is not None and op.kind not in (*SOFTMAXES, "_log_softmax"):
        after.append(op)
        before = op.input("self")
        op = None if before is None or op.kind not in _KEEPS_PLACES else reading.tape.producer(before)
    if op is None:
        return None
    axes = len(reading.tape.values[op.outs[0]].shape)
    order = list(range(axes))
    for each in reversed(after):
        if each.kind == "permute":
            order = [order[int(dim)] for dim in each.args["dims"]]
        elif each.kind in ("transpose", "t"):
            one, two = (int(each.args.get(name, place)) for name, place in (("dim0", 0), ("dim1", 1)))
            order[one], order[two] = order[two], order[one]
    return order.index(int(op.args["dim"]) % axes) if axes else None


_KEEPS_PLACES: Final = frozenset({"permute", "transpose", "t", "detach", "clone", "contiguous", "alias", "_to_copy"})


def _over_samples(reading: TapeReading) -> Found | None:
    """Find a softmax over the samples whose result still has a row for each of them.

    Where samples are compared with each other, as in contrastive learning, another dimension runs over samples too.
    """
    axes = reading.labels.axes
    for op in reading.forward_ops:
        value = op.input("self")
        if op.kind not in (*SOFTMAXES, "_log_softmax") or value is None or op.outs[0] not in reading.learning:
            continue
        label = reading.labels.get(value)
        over = int(op.args["dim"]) % max(len(label), 1)
        others = [dim for place, dim in enumerate(label) if place != over]
        if not (len(label) > 1 and axes.has_samples(label[over])) or any(map(axes.has_samples, others)):
            continue
        if _is_judged_by_sample(reading, op.outs[0]) or _is_mixed_by_sample(reading, op.outs[0], over):
            return _crossed(reading, op, "that dimension holds the samples of the batch, which compete now")
    return None


def _is_judged_by_sample(reading: TapeReading, value: int) -> bool:
    """Return whether a loss that depends on a value has rows for samples: else they are one bag on purpose."""
    after = reading.tape.descendants([value])
    return any(
        loss.value in after and any(map(reading.labels.axes.has_samples, reading.labels.get(loss.value)))
        for loss in reading.losses
    )


def _is_mixed_by_sample(reading: TapeReading, value: int, over: int) -> bool:
    """Return whether logarithms of probabilities are added up to those of a mixture for each sample."""
    shape = reading.tape.values[value].shape
    alike = reading.tape.descendants([value], through=functools.partial(_keeps_shape, reading, shape))
    uses = (use for each in alike for use in reading.tape.consumers(each) if use.kind == "logsumexp")
    return any(over not in reduced(use, len(shape)) for use in uses)


def _crossed(reading: TapeReading, op: Op, why: str) -> Found:
    value = op.input("self")
    shape = reading.tape.values[value].shape if value is not None else ()
    name = "log_softmax" if op.kind == "_log_softmax" else "softmax"
    dim = int(op.args["dim"])
    return Found(
        sites=tuple(dict.fromkeys((reading.site(op, signals.LOSS), signals.LOSS))),
        evidence=(fact(f"dimension of {shape} that {name} runs over", dim % max(len(shape), 1)),),
        cause=f"A {name} of {shape} runs over dimension {dim}{reading.where(op)}, but {why}.",
        refute="Print the sum of its result over the classes: if all sums are 1, this finding is wrong.",
    )


@on_tape
def wrongly_broadcast(reading: TapeReading) -> Found | None:
    """Find shapes that broadcast between model and loss though each sample should meet its own numbers."""
    return _column_meets_row(reading) or _stretched_output(reading) or _dimensions_apart(reading)


def _stretched_output(reading: TapeReading) -> Found | None:
    """Find one output of a sample that a loss of torch's compares with several targets of it."""
    for loss in reading.losses:
        op = reading.tape.producer(loss.value)
        source = None if op is None or op.kind != "expand" or op.function != loss.kind else op.input("self")
        if op is None or source is None or loss.target is None or source not in reading.learning:
            continue
        before, after = reading.tape.values[source].shape, reading.tape.values[loss.value].shape
        wanted = reading.numbers.of(loss.target)
        if len(before) != len(after) or before[:1] != after[:1] or (wanted is not None and _repeats(wanted, before)):
            continue
        return Found(
            sites=(signals.LOSS,),
            evidence=(
                fact("numbers in the output", reading.tape.values[source].size),
                fact("numbers that they are compared with", reading.tape.values[loss.value].size),
            ),
            cause=f"{loss.kind} compares an output of shape {before} with a target of shape {after}"
            f"{reading.where(loss.op)}: one number is compared with several different targets of the same sample, and "
            "the best it can be is their mean.",
            fix="Give both the same shape; a log-probability of several dimensions is summed: log_prob.sum(-1, "
            "keepdim=True).",
            refute="Print both shapes on that line: if they are equal, this finding is wrong.",
        )
    return None


def _repeats(wanted: Numbers, before: tuple[int, ...]) -> bool:
    """Return whether a target has the same number wherever the output was stretched."""
    places = tuple(place for place, size in enumerate(before) if size != wanted.shape[place])
    return bool((wanted == wanted.take([0], axis=places[0])).all()) if len(places) == 1 else True


_NORMALISER: Final = 0.9189385332046727
"""The logarithm of the root of 2 pi, which the log-density of a normal distribution ends with."""


def _dimensions_apart(reading: TapeReading) -> Found | None:
    """Find log-densities of single dimensions of a drawn action that meet one number of each sample."""
    for op in reading.forward_ops:
        shape = reading.tape.values[op.outs[0]].shape if op.outs else ()
        if op.function != "log_prob" or op.kind != "sub" or len(shape) < 2 or shape[-1] < 2:
            continue
        if op.args.get("other") != _NORMALISER or not _is_drawn(reading, op):
            continue
        apart = reading.tape.descendants(op.outs, through=functools.partial(_keeps_shape, reading, shape))
        for use in sorted({use.index for value in apart for use in reading.tape.consumers(value)}):
            meets = reading.tape.ops[use]
            pair = reading.pair(meets)
            others = [] if pair is None else [each for each in pair if each not in apart]
            if (
                meets.kind.removesuffix("_") in _PAIRWISE
                and not meets.module
                and any(reading.tape.values[each].shape == (*shape[:-1], 1) for each in others)
                and not reading.needed.isdisjoint(meets.outs)
            ):
                return Found(
                    sites=(signals.LOSS, signals.LOOP),
                    evidence=(fact("dimensions of an action", shape[-1]), fact("numbers it meets", 1)),
                    cause=f"Log-probabilities of shape {shape}, one for each dimension of an action, meet one number "
                    f"of each sample{reading.where(meets)}: they were not added up, so each dimension is taken for an "
                    "action of its own.",
                    fix="Add up the dimensions: log_prob.sum(-1, keepdim=True), or use Independent(dist, 1).",
                    refute="Print the shape of log_prob: if its last dimension is 1, this finding is wrong.",
                )
    return None


def _is_drawn(reading: TapeReading, op: Op) -> bool:
    """Return whether a log-density is that of numbers drawn in this step."""
    makers = reading.makers(op.outs, lambda each: not each.is_random and not each.in_model)
    return any(maker.is_random for maker in makers)


def _keeps_shape(reading: TapeReading, shape: tuple[int, ...], op: Op) -> bool:
    return bool(op.outs) and not op.module and reading.tape.values[op.outs[0]].shape == shape


def _column_meets_row(reading: TapeReading) -> Found | None:
    """Find a column (N, 1) that is broadcast with a row (N,) outside the model, both of them over the samples."""
    tape = reading.tape
    for op in reading.forward_ops:
        kind, first, second = op.kind.removesuffix("_"), op.input("self"), op.input("other")
        if op.module or kind not in _PAIRWISE or first is None or second is None:
            continue
        pair = sorted((first, second), key=lambda value: len(tape.values[value].shape))
        row, column = (tape.values[value].shape for value in pair)
        if len(row) != 1 or len(column) != 2 or column != (row[0], 1) or row[0] < 2:
            continue
        is_meant = any(_is_unsqueezed(reading, value) for value in pair) or _is_only_added(reading, op)
        is_meant = is_meant or _meets_products(reading, op)
        are_rows = _are_same_rows(reading, *pair) or all(_is_of_samples(reading, each) for each in pair)
        if not is_meant and (are_rows or _are_as_many(reading, *pair)):
            return Found(
                step=tape.step,
                sites=(signals.LOSS,),
                evidence=(fact("samples in the batch", row[0]), fact("pairs that are made", row[0] ** 2)),
                cause=f"A column of shape {column} meets a row of shape {row}{reading.where(op)}: both are broadcast "
                f"to {(row[0], row[0])}, and each sample is combined with every other.",
                fix="Give both the same shape: squeeze(1) the column, or unsqueeze(1) the row.",
                refute="Print the shapes on that line: if they are equal, this finding is wrong.",
            )
    return None


_ADDING: Final = frozenset({"add", "sub", "neg", "mean", "sum", *RESHAPING})


def _meets_products(reading: TapeReading, op: Op) -> bool:
    """Return whether all pairs are added to the products of all pairs, as in |a|^2 + |b|^2 - 2 ab."""
    sums = reading.tape.descendants(op.outs, through=lambda use: use.kind.removesuffix("_") in ("add", "sub"))
    uses = (use for value in sums for use in reading.tape.consumers(value))
    met = {value for use in uses for value in (reading.pair(use) or ()) if value not in sums}
    makers = (reading.makers((value,), lambda made: made.kind.removesuffix("_") in ("mul", "div")) for value in met)
    return any(maker.kind in ("mm", "bmm", "matmul") for made in makers for maker in made)


def _is_only_added(reading: TapeReading, op: Op) -> bool:
    """Return whether all pairs are added and nothing but added further: their mean is the sum of both means."""

    def is_linear(use: Op) -> bool:
        kind = use.kind.removesuffix("_")
        return kind in _ADDING or (kind in ("mul", "div") and use.input("other") is None)

    after = reading.tape.descendants(op.outs, through=is_linear) if is_linear(op) else set()
    uses = (use for value in after for use in reading.tape.consumers(value) if use.phase == "forward")
    return bool(after) and all(map(is_linear, uses))


def _are_same_rows(reading: TapeReading, row: int, column: int) -> bool:
    """Return whether both run over one axis of data, which at least one model's output has a number for each of."""
    one, other = reading.dim(row, 0), reading.dim(column, 0)
    return bool(one) and one == other and not reading.learnt.isdisjoint((row, column))


def _are_as_many(reading: TapeReading, row: int, column: int) -> bool:
    """Return whether a model's outputs meet as many other numbers, where nothing shows what the samples are.

    A column that a reduction has kept on purpose is meant to be one.
    """
    maker = reading.tape.producer(column)
    if reading.labels.axes.samples or (maker is not None and maker.args.get("keepdim")):
        return False
    return not reading.learnt.isdisjoint((row, column)) and all(
        _is_learnt_or_data(reading, each) for each in (row, column)
    )


def _is_of_samples(reading: TapeReading, value: int) -> bool:
    return reading.has_samples(value) and _is_learnt_or_data(reading, value)


def _is_learnt_or_data(reading: TapeReading, value: int) -> bool:
    """Return whether a value depends on anything but counting and random draws, which make positions in a series."""
    within = (reading.tape.values[each] for each in reading.tape.ancestors(value))
    return any(each.is_given and each.role not in ("constant", "random") for each in within)


_SAME_SHAPE: Final = frozenset({"expand", "_to_copy", "clone", "detach", "alias"})


def _is_unsqueezed(reading: TapeReading, value: int) -> bool:
    op = reading.tape.producer(reading.plain(value, _SAME_SHAPE).id)
    if op is not None and op.kind == "index":  # rows that are taken of data keep their shape
        source = op.input("self")
        return source is None or len(reading.tape.values[source].shape) != len(reading.tape.values[op.outs[0]].shape)
    return op is not None and op.kind in ("unsqueeze", "t", "transpose", "permute")


@on_tape
def praised(reading: TapeReading) -> Found | None:
    """Find log-probabilities of data or of rewards that are minimised: the minus before them is missing."""
    if len(reading.tape.optimizers) != 1:
        return None
    learnt = [term for term in reading.terms if reading.tape.values[term.value].requires_grad]
    signs = [(sign, term) for term in learnt if (sign := _sign_of_likelihood(reading, term)) is not None]
    if not signs or any(sign < 0 for sign, _ in signs) or len(learnt) > len(signs):
        return None
    op = reading.tape.producer(signs[0][1].value)
    return Found(
        sites=(signals.LOSS,),
        evidence=(fact("log-probabilities that are minimised", len(signs)),),
        cause=f"Log-probabilities are minimised{reading.where(op)}: the minus before them is missing, so training "
        "makes what it should prefer less likely.",
    )


@on_tape
def lowered_surrogate(reading: TapeReading) -> Found | None:
    """Find a clipped surrogate, the smaller of two products of a policy's ratio, that is minimised, or the larger."""
    for term in reading.terms:
        sign, op = term.sign, reading.tape.producer(term.value)
        while op is not None and op.kind != "gather" and (op.kind in KEEPS_SIGN or op.kind == "neg"):
            learnt = [each for _, each in op.inputs() if reading.tape.values[each].requires_grad]
            if len(learnt) != 1:
                break
            sign, op = sign * _factor_sign(op), reading.tape.producer(learnt[0])
        if op is None or op.kind not in ("minimum", "maximum"):
            continue
        sides = [
            reading.makers((each,), lambda made: made.kind in ("mul", "clamp", "exp", "neg")) for _, each in op.inputs()
        ]
        # The smaller of two costs is the larger of two gains: a minus before both turns the two round.
        turned = all(any(made.kind == "neg" or _is_turned(reading, made) for made in side) for side in sides)
        is_smaller, is_lowered = (op.kind == "minimum") != turned, (sign > 0) != turned
        if is_smaller != is_lowered:
            continue
        if all(any(map(reading.is_policy_ratio, makers)) for makers in sides):
            is_minimised = is_smaller
            return Found(
                sites=(signals.LOSS,),
                evidence=(fact(f"clipped surrogates that {'are minimised' if is_minimised else 'clip nothing'}", 1),),
                cause=f"The clipped surrogate of a policy is minimised{reading.where(op)}: the minus before it is "
                "missing, so actions become less likely the better they are."
                if is_minimised
                else f"The larger of the clipped and the unclipped surrogate is maximised{reading.where(op)}: clipping "
                "never holds a step back then, since the other of the two counts.",
                fix="policy_loss = -torch.min(ratio * advantage, clipped * advantage).mean()",
            )
    return None


@on_tape
def inverted_ratio(reading: TapeReading) -> Found | None:
    """Find a ratio of two policies that is clipped around 1 and has what is learnt below, not above."""
    for op in reading.forward_ops:
        low, high = number(op.args.get("min") or 0), number(op.args.get("max") or 0)
        ratio = reading.origin(op.args["self"]["v"]) if op.kind == "clamp" and 0 < low < 1 < high else None
        before = None if ratio is None or ratio.kind != "exp" else reading.tape.producer(ratio.args["self"]["v"])
        old, new = (None, None) if before is None else (before.input("self"), before.input("other"))
        if before is None or before.kind != "sub" or old is None or new not in reading.learnt or old in reading.learnt:
            continue
        return Found(
            sites=(signals.LOSS,),
            evidence=(fact("lower end of the clipped ratio", low), fact("upper end", high)),
            cause=f"The ratio of the policies is upside down{reading.where(before)}: exp(old - new) has the policy "
            "that learns below, so actions become less likely the better they are.",
            fix="ratio = torch.exp(new_log_prob - old_log_prob)",
        )
    return None


def _is_turned(reading: TapeReading, product: Op) -> bool:
    """Return whether one side of a product has a minus of its own."""
    return product.kind == "mul" and any(is_negated(reading, each) for _, each in product.inputs())


def _sign_of_likelihood(reading: TapeReading, term: Term) -> int | None:
    """Return the sign of the log-probabilities that a term averages, weighed by numbers that are not learnt."""
    value, sign = term.value, term.sign
    for _ in range(MAX_STEPS):
        op = reading.tape.producer(value)
        if op is None:
            return None
        kind = op.kind.removesuffix("_") if not op.kind.startswith("_") else op.kind
        if kind == "_log_softmax":
            return None if op.function == "cross_entropy" else sign
        learnt = [each for _, each in op.inputs() if reading.tape.values[each].requires_grad]
        if kind in ("stack", "cat"):  # of the steps of an episode, all alike
            learnt = learnt[:1]
        if len(learnt) != 1 or (kind not in (*KEEPS_SIGN, "neg", "stack", "cat")):
            return _is_log_probability(reading, op, sign)
        if any(is_negated(reading, each) for _, each in op.inputs() if each != learnt[0]):
            return None
        sign *= _factor_sign(op)
        value = learnt[0]
    return None


def is_negated(reading: TapeReading, weight: int) -> bool:
    """Return whether a weight has a minus of its own: `-advantage` turns a loss round, `-cost` is a reward."""
    op = reading.origin(weight)
    return op is not None and _factor_sign(op) < 0


def _factor_sign(op: Op) -> int:
    """Return the sign that a minus, or a number that is multiplied with or divided by, gives a result."""
    kind = op.kind.removesuffix("_")
    factor = number(op.args.get("other")) if kind in ("mul", "div") and op.input("other") is None else None
    return -1 if kind == "neg" or (isinstance(factor, int | float) and factor < 0) else 1


def _is_log_probability(reading: TapeReading, op: Op, sign: int) -> int | None:
    """Return the sign if an operation subtracts the log-sum-exp from scores, as torch's distributions do."""
    other = op.input("other")
    maker = None if other is None else reading.tape.producer(other)
    return sign if op.kind == "sub" and maker is not None and maker.kind == "logsumexp" else None


MAX_STEPS: Final = 32
KEEPS_SIGN: Final = frozenset({"mean", "sum", "mul", "div", "gather", *CARRIERS})


@on_tape
def mixed_reductions(reading: TapeReading) -> Found | None:
    """Find terms of which some are averaged over the samples and others summed."""
    count = reading.count_samples()
    if count < 2:
        return None
    ways = {term: reading.over_samples(term) for term in reading.terms if reading.tape.values[term.value].requires_grad}
    summed = [term for term, way in ways.items() if way == "sum"]
    averaged = [term for term, way in ways.items() if way == "mean"]
    if not summed or not averaged:
        return None
    one, other = (reading.origin(term.value) for term in (summed[0], averaged[0]))
    return Found(
        sites=(signals.LOSS,),
        evidence=(fact("samples in the batch", count), fact("terms that are summed", len(summed))),
        cause=f"One term of the loss is summed over the {count} samples{reading.where(one)}, another is averaged"
        f"{reading.where(other)}: the first weighs {count} times as much as written.",
        fix="Use the same reduction for all terms: the mean over the samples, or the sum over them.",
        refute="Train with half the batch size: if both terms keep their ratio, this finding is wrong.",
    )


OUTWEIGHED = Threshold(
    8.0, "weight of a divergence over that of the reconstruction, for each sample: a beta of 8 is large"
)
_LIKELIHOODS: Final = ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")


@on_tape
def averaged_against_summed(reading: TapeReading) -> Found | None:
    """Find a reconstruction that is averaged over its numbers beside a divergence that is summed over its own."""
    rows = reading.count_samples()
    terms = [term for term in reading.terms if reading.tape.values[term.value].requires_grad]
    fits = [
        (term, loss)
        for term in terms
        for loss in reading.holds(term)
        if loss.kind in _LIKELIHOODS and loss.op.args.get("reduction", 1) == 1 and loss.target is not None
    ]
    summed = [term for term in terms if _is_summed_divergence(reading, term)]
    for (fit, loss), term in ((one, two) for one in fits for two in summed):
        size = reading.tape.values[loss.value].size // max(rows, 1)
        # The half of the divergence may stand before it or within it.
        weight = size * min(1.0, 2 * term.factor) / max(fit.factor, 1e-12)
        if rows > 1 and term.factor >= 1 / 2 and weight >= OUTWEIGHED:
            return Found(
                severity="warning",
                sites=(signals.LOSS, signals.LOOP),
                evidence=(
                    above("weight of the divergence over that of the reconstruction", weight, OUTWEIGHED),
                    fact("numbers of a sample that are averaged", size),
                ),
                cause=f"The reconstruction is averaged over the {size} numbers of a sample{reading.where(loss.op)}, "
                f"and the divergence is summed over its dimensions{reading.where(reading.origin(term.value))}: it "
                f"weighs {weight:.0f} times as much as in the bound, so that codes are driven to say nothing.",
                fix=f"Sum both: multiply the reconstruction by {size}, or divide its sum by the batch size.",
                refute="Print the divergence after an epoch: if it is not near 0, this finding is wrong.",
            )
    return None


def _is_summed_divergence(reading: TapeReading, term: Term) -> bool:
    """Return whether a term averages over samples a divergence that was summed over its dimensions."""
    makers = divergence(reading, term)
    sums = [op for op in makers if op.kind == "sum" and 0 not in _reduced_by(reading, op)]
    return bool(sums) and reading.over_samples(term) == "mean"


def divergence(reading: TapeReading, term: Term) -> list[Op]:
    """Return the operations of a term that is made of exp(v), v and squares of learnt numbers; none of another term."""
    through = reading.makers(term.value, lambda op: not op.in_model and op.kind not in CUTS)
    makers = [op for op in through if not op.in_model]
    exponents = [op.input("self") for op in makers if op.kind == "exp"]
    squares = any(op.kind in ("pow", "square") or (op.kind == "mul" and len(set(_both(op))) == 1) for op in makers)
    used = {reading.plain(each).id for op in makers if op.kind in ("add", "sub", "rsub") for each in _both(op)}
    is_own = any(each is not None and reading.plain(each).id in used for each in exponents)
    return makers if squares and is_own else []


CUTS: Final = frozenset({"normal_", "randn_like", "detach"})


def _reduced_by(reading: TapeReading, op: Op) -> set[int]:
    return reduced(op, len(reading.tape.values[_both(op)[0]].shape))


def _both(op: Op) -> list[int]:
    return [value for _, value in op.inputs()]


ROUNDING: Final = 1e-6
OUTWEIGHS = Threshold(3.0, "a penalty on weights over the other terms of the loss: usual ones are far below 1")


@on_first_tape
def outweighing_penalty(reading: TapeReading) -> Found | None:
    """Find terms of the loss that are made of weights alone and are larger than all that is made of data together."""
    return next((found for root in reading.roots if (found := _outweighs(reading, root)) is not None), None)


def _outweighs(reading: TapeReading, root: int) -> Found | None:
    terms = [term for term in reading.terms_of(root) if reading.tape.values[term.value].requires_grad]
    penalties = [term for term in terms if _is_of_weights(reading, term)]
    total = _size(reading, Term(root, 1))
    penalty = sum(term.sign * _size(reading, term) for term in penalties)
    rest = abs(total - penalty)
    if len(penalties) == len(terms) or not rest > ROUNDING * penalty or not penalty >= OUTWEIGHS * rest:
        return None
    return Found(
        sites=(signals.LOSS, "optimizer"),
        evidence=(
            above("penalty over the other terms of the loss", penalty / rest, OUTWEIGHS),
            fact("the penalty in this step", penalty),
            fact("the other terms", rest),
        ),
        cause=f"Most of what is minimised is a penalty on weights{reading.where(reading.origin(penalties[0].value))}: "
        f"it is {penalty / rest:.0f} times as large as the rest of the loss, so that training makes weights small "
        "instead.",
        fix="Divide the factor of the penalty by 100 or more; 1e-4 is usual.",
    )


def _size(reading: TapeReading, term: Term) -> float:
    """Return the number that a term adds; NaN if it cannot be computed of what the tape holds."""
    content = reading.numbers.of(term.value)
    return float("nan") if content is None or content.size != 1 else float(content.max()) * term.factor


def _is_of_weights(reading: TapeReading, term: Term) -> bool:
    """Return whether a term depends on parameters alone: on no input, target, random number or state."""
    within = [reading.tape.values[each] for each in reading.tape.ancestors(term.value)]
    return {each.role for each in within if each.is_given} <= {"parameter", "constant"} and term.value not in {
        value.id for value in within if value.is_given
    }


@on_tape
def idle_term(reading: TapeReading) -> Found | None:
    """Find a term that depends on trained parameters, or compares something, but through which no gradient passes."""
    held = set(reading.held.values())
    for term in reading.terms:
        if term.value in reading.learning and reading.tape.values[term.value].requires_grad:
            continue
        if len(reading.terms) < 2 or not (held & reading.tape.ancestors(term.value) or _compares(reading, term)):
            continue
        if not held & reading.tape.ancestors(term.value):
            return _untrained(reading, term)
        cut = _cut_in(reading, term.value)
        return Found(
            sites=(signals.LOSS,),
            evidence=(fact("terms of the loss", len(reading.terms)),),
            cause=f"A term of the loss has no effect: its gradient is cut off{reading.where(cut)}, so no parameter "
            "learns from it.",
        )
    return None


@on_tape
def term_as_number(reading: TapeReading) -> Found | None:
    """Find a number that is added to a loss and was read off what depends on trained parameters, as by `.item()`."""
    held = set(reading.held.values())
    added = [op for op in reading.tape.ops if _adds_number(op) and op.outs[0] in reading.learning]
    added = [op for op in added if reading.tape.values[op.outs[0]].size == 1]
    for read in reading.tape.ops if added else ():
        value = read.input("self") if read.kind == "_local_scalar_dense" else None
        term = None if value is None else reading.plain(value, CARRIERS).id
        if term is None or term in reading.learning or not held & reading.tape.ancestors(term):
            continue
        content = reading.numbers.of(term)
        taken = float(content.sum()) if content is not None and content.size == 1 else 0.0
        for op in added:
            if op.index > read.index and _is_multiple(float(op.args["other"]), taken):
                return Found(
                    sites=(signals.LOSS,),
                    evidence=(fact("number that is added", float(op.args["other"])),),
                    cause=f"A term of the loss has no effect: it is added as a number{reading.where(op)}, which was "
                    "read off a tensor, so no parameter learns from it.",
                )
    return None


def _adds_number(op: Op) -> bool:
    """Return whether a number of the program is added outside of models: one that was written down is no float."""
    other = op.args.get("other")
    return op.kind.removesuffix("_") in ("add", "sub", "rsub") and isinstance(other, float) and not op.in_model


def _is_multiple(added: float, term: float) -> bool:
    """Return whether one number is the other times a factor that somebody has written down: of a few digits."""
    factor = abs(added / term) if term else 0.0
    return 1e-3 <= factor <= 1e3 and math.isclose(factor, float(f"{factor:.2g}"), rel_tol=3e-6)


@on_tape
def constant_term(reading: TapeReading) -> Found | None:
    """Find a mean or sum of probabilities over the very axis on which they add up to one: it is a constant."""
    for op in reading.tape.ops:
        value = op.input("self") if op.kind in ("mean", "sum") else None
        maker = None if value is None else reading.tape.producer(value)
        if value is None or maker is None or maker.kind not in SOFTMAXES or op.outs[0] not in reading.needed:
            continue
        axes = len(reading.tape.values[value].shape)
        dim = op.args.get("dim")
        dims = dim if isinstance(dim, list) else [] if dim is None else [dim]
        over = {int(each) % axes for each in dims or range(axes)}
        divides = any(use.kind == "div" and use.input("other") in op.outs for use in reading.tape.consumers(op.outs[0]))
        if int(maker.args["dim"]) % axes in over and not divides:
            return Found(
                sites=(signals.LOSS, reading.site(maker, "(model)")),
                evidence=(fact("probabilities that are added up", reading.tape.values[value].size),),
                cause=f"A term of the loss has no effect: the {op.kind} of a softmax{reading.where(op)} runs over the "
                "axis on which its probabilities add up to one, so it is a constant without a gradient.",
                fix="Take it over the samples: probabilities.mean(dim=0).",
            )
    return None


def _untrained(reading: TapeReading, term: Term) -> Found:
    return Found(
        sites=(signals.LOSS,),
        evidence=(fact("terms of the loss", len(reading.terms)), fact("trained parameters it depends on", 0)),
        cause=f"A term of the loss has no effect{reading.where(reading.origin(term.value))}: it does not depend on any "
        "trained parameter, as where a teacher is compared with itself.",
        fix="Put the output of the model that is trained into this term.",
    )


def _compares(reading: TapeReading, term: Term) -> bool:
    """Return whether a term is one of torch's losses, neither side of which is trained."""
    return any(op.phase == "forward" and op.function in LOSS_FUNCTIONS for op in reading.makers(term.value))


def _cut_in(reading: TapeReading, value: int) -> Op | None:
    cuts = [op for op in reading.makers(value) if not reading.tape.is_differentiable(op)]
    return max(cuts, key=lambda op: op.index, default=None)


def cut_off(case: Case, names: list[str]) -> str:
    """Return in words by which operation the gradient of some parameters is cut off; empty if that is not known."""
    reading = case.taped
    if reading is None:
        return ""
    op = reading.cut_off({value for name, value in reading.held.items() if name in names})
    if op is None:
        return ""
    is_new = not reading.came_back.keys().isdisjoint(value for _, value in op.inputs())
    how = "a new tensor of its numbers" if is_new else f"`{op.function or op.kind}`"
    return f", by {how if op.grad_enabled else 'torch.no_grad()'}{reading.where(op)}"


@on_tape
def mixed_axes(reading: TapeReading) -> Found | None:
    """Find a view that breaks up an axis, or samples of an output that are compared with those of others."""
    labels = reading.labels
    for op in reading.forward_ops:
        if _runs_along_samples(reading, op):
            return _along_samples(reading, op)
    cuts = [cut for cut in labels.cuts if reading.tape.ops[cut.op].outs[0] in reading.needed]
    if cuts:
        return _broken_up(reading, cuts[0])
    for index, table in labels.indexed:
        if reading.tape.ops[index].outs[0] in reading.needed:
            return _by_sample(reading, reading.tape.ops[index], table)
    for conflict in labels.conflicts:
        op = reading.tape.ops[conflict.op]
        if any(out in reading.needed for out in (*op.outs, *op.writes)):
            return _mismatched(reading, op, conflict.size)
    questions = (_one_for_all, _by_statistics_of_samples, _over_the_batch, _length_of_all, _chosen_of_samples)
    return next((found for ask in questions if (found := ask(reading)) is not None), None)


def _chosen_of_samples(reading: TapeReading) -> Found | None:
    """Find numbers that are chosen among the samples, by one index for each, and always from the first column."""
    for op in reading.forward_ops:
        value, index = (op.input(name) for name in ("self", "index")) if op.kind == "gather" else (None, None)
        if value is None or index is None or not reading.tape.values[value].requires_grad:
            continue
        shape, chosen = reading.tape.values[value].shape, reading.tape.values[index].shape
        at = op.args["dim"] % max(1, len(shape))
        if len(shape) != 2 or at != 0 or chosen[1] != 1 or shape[1] == 1 or chosen[0] != shape[0]:
            continue
        if op.outs[0] in reading.needed and reading.is_samples(value, 0):
            return Found(
                sites=(signals.LOSS, "(model)"),
                evidence=(fact(f"columns of {shape} that are never read", shape[1] - 1),),
                cause=f"gather takes values of shape {shape} along dimension 0{reading.where(op)}, which holds the "
                "samples: each index picks the first number of some sample, not a number of its own.",
                fix="Pick a column of each row: values.gather(1, index).",
                refute="Compare with values[torch.arange(len(values)), index[:, 0]]: if both agree, this is wrong.",
            )
    return None


def _length_of_all(reading: TapeReading) -> Found | None:
    """Find a penalty that draws the length of the gradient of a whole batch to 1, not that of each sample."""
    for op in reading.forward_ops:
        value = op.input("self") if op.kind in ("linalg_vector_norm", "norm") and not op.in_model else None
        maker = None if value is None else reading.tape.producer(reading.plain(value).id)
        if value is None or maker is None or maker.phase != "backward" or reading.tape.values[op.outs[0]].size != 1:
            continue
        shape = reading.tape.values[value].shape
        uses = [use for use in reading.tape.consumers(op.outs[0]) if use.kind == "sub" and use.args.get("other") == 1]
        if len(shape) > 1 and shape[0] > 1 and uses and not uses[0].module:
            return Found(
                sites=(signals.LOSS,),
                evidence=(fact("samples whose gradients have one length together", shape[0]),),
                cause=f"One length is taken of the gradients of all {shape[0]} samples{reading.where(op)} and drawn to "
                "1: the gradient of a single sample becomes far smaller.",
                fix="Take the length of each sample: gradient.flatten(1).norm(2, dim=1).",
                refute="Print the shape of the length: if it has a number for each sample, this finding is wrong.",
            )
    return None


def _over_the_batch(reading: TapeReading) -> Found | None:
    """Find outputs outside the model that are divided by a length over all samples, not by their own."""
    for op in reading.forward_ops:
        value = op.input("self") if op.kind in ("linalg_vector_norm", "norm") and not op.in_model else None
        shape = () if value is None else reading.tape.values[value].shape
        if value is None or not reading.tape.values[value].requires_grad or len(shape) < 2:
            continue
        over = reduced(op, len(shape))
        is_whole = len(over) != 1 or max(size for place, size in enumerate(shape) if place not in over) == 1
        if is_whole or not reading.is_samples(value, min(over)) or not _divides(reading, op, value):
            continue
        return Found(
            sites=(signals.LOSS, "(model)"),
            evidence=(fact(f"dimension of {shape} that the length runs over", min(over)),),
            cause=f"Outputs of shape {shape} are normalised over dimension {min(over)}{reading.where(op)}, which holds "
            "the samples of the batch: each feature is scaled by those of all other samples.",
            fix="Normalise the features of each sample: dim=-1.",
            refute="Print the length of each row of the result: if all are 1, this finding is wrong.",
        )
    return None


def _divides(reading: TapeReading, length: Op, value: int) -> bool:
    """Return whether a value is divided by its own length."""
    through = (*CARRIERS, "clamp_min", "clamp", "add", "maximum")
    lengths = reading.tape.descendants(length.outs, through=lambda op: op.kind in through)
    return any(use.kind == "div" and use.input("other") in lengths for use in reading.tape.consumers(value))


_OVER_ROWS: Final = frozenset(
    {"mean", "sum", "var", "std", "var_mean", "amax", "amin", "max", "min", "linalg_vector_norm", "norm", "logsumexp"}
)
_MEETS: Final = frozenset({"sub", "div", "mul", "rsub", "add"})


def _by_statistics_of_samples(reading: TapeReading) -> Found | None:
    """Find a statistic over the samples in a model that the samples are then shifted or scaled by.

    A norm layer that is written by hand keeps running statistics for evaluation: then it is meant.
    """
    for op in reading.forward_ops:
        source = op.input("self")
        if op.kind not in _OVER_ROWS or not op.in_model or source is None or "Norm" in reading.kind_of(op.module):
            continue
        label = reading.labels.get(source)
        over = [label[dim] for dim in reduced(op, len(label))] if label else []
        if not any(map(reading.labels.axes.has_samples, over)) or len(reading.tape.values[source].shape) < 2:
            continue
        met = _met_by_samples(reading, op.outs[0])
        if met is not None and not _is_kept(reading, op) and _is_judged_by_sample(reading, met.outs[0]):
            return Found(
                sites=(reading.site(op, "(model)"), "(model)"),
                evidence=(fact("samples that the statistic is taken over", reading.count_samples()),),
                cause=f"`{op.function or op.kind}` runs over the samples of the batch{reading.where(op)}, and each "
                f"sample is combined with the result{reading.where(met)}: its output depends on the other samples, and "
                "is another one in another batch.",
                fix="Take the statistic over the features of each sample (dim=-1), or use nn.BatchNorm, which keeps "
                "running statistics for evaluation.",
                refute="Run one sample alone and within a batch: if both outputs agree, this finding is wrong.",
            )
    return None


def _met_by_samples(reading: TapeReading, value: int) -> Op | None:
    """Return an operation in a model that combines a statistic with numbers that each sample has."""
    small = reading.tape.values[value].shape
    after = reading.tape.descendants([value], through=lambda op: op.in_model and _is_still_small(reading, op, small))
    for each in sorted(after):
        for op in reading.tape.consumers(each):
            others = [other for _, other in op.inputs() if other not in after]
            if op.in_model and op.kind.removesuffix("_") in _MEETS and any(map(reading.has_samples, others)):
                return op
    return None


def _is_still_small(reading: TapeReading, op: Op, shape: tuple[int, ...]) -> bool:
    """Return whether an operation makes of a statistic another of about the same size."""
    most = max(1, *shape) if shape else 1
    return bool(op.outs) and reading.tape.values[op.outs[0]].size <= most * max(1, len(shape))


def _is_kept(reading: TapeReading, op: Op) -> bool:
    """Return whether a statistic is also written to something that lasts, such as a running mean."""
    after = reading.tape.descendants(op.outs)
    return any(
        each.writes and not after.isdisjoint(each.writes) and reading.tape.values[each.writes[0]].role == "buffer"
        for each in reading.tape.ops
    )


def _one_for_all(reading: TapeReading) -> Found | None:
    """Find a loss all rows of whose input are one row, made of all samples together and expanded."""
    for loss in reading.losses:
        op = _expansion(reading, loss.value)
        source = None if op is None else op.input("self")
        if op is None or source is None or not _pools_rows(reading, source):
            continue
        count = reading.tape.values[loss.value].shape[0]
        return Found(
            severity="critical",
            sites=(reading.site(op, "(model)"), "(model)"),
            evidence=(fact("rows that are compared with targets", count), fact("different rows", 1)),
            cause=f"All samples of the batch are pooled together, and the one result is expanded to {count} rows"
            f"{reading.where(op)}: every sample gets the same output, which depends on all samples.",
            fix="Pool within each sample: over its own dimension, or by index_add_ with the number of the sample.",
            refute="Print the output: if its rows differ, this finding is wrong.",
        )
    return None


def _expansion(reading: TapeReading, value: int) -> Op | None:
    """Return the operation that made all rows of a value of one row, if there is one."""
    rows = reading.tape.values[value].shape[:1]
    for _ in range(MAX_STEPS):
        op = reading.tape.producer(value)
        names = ("mat1", "self", "input")
        before = None if op is None else next((op.input(name) for name in names if name in op.args), None)
        if op is None or before is None:
            return None
        shape = reading.tape.values[before].shape
        is_new = len(shape) < len(reading.tape.values[value].shape) or shape[:1] != rows
        if op.kind == "expand" and is_new and rows:
            return op
        others = [each for _, each in op.inputs() if reading.tape.values[each].shape[:1] == rows and each != before]
        if op.kind == "addmm":
            others = [each for each in others if each not in (op.input("mat2"), op.input("self"))]
        if shape[:1] != rows or others:
            return None
        value = before
    return None


def _pools_rows(reading: TapeReading, value: int) -> bool:
    """Return whether a value is a mean, sum or maximum over the first dimension of what a layer computed."""
    op = reading.origin(value)
    source = None if op is None else op.input("self")
    if op is None or source is None or op.kind not in ("mean", "sum", "amax", "max"):
        return False
    shape = reading.tape.values[source].shape
    return len(shape) > 1 and 0 in reduced(op, len(shape)) and reading.tape.values[source].requires_grad


@on_tape
def norm_of_a_part(reading: TapeReading) -> Found | None:
    """Find a norm of a gradient of inputs that is taken over some of the dimensions of a sample only."""
    asked = {
        gradient for mark in reading.tape.backwards() if _asks_inputs(mark) for gradient in _between(reading, mark)
    }
    for op in reading.tape.ops:
        source = op.input("self")
        if op.kind not in _NORMS or op.phase == "backward" or source is None or op.outs[0] not in reading.needed:
            continue
        plain = reading.plain(source)
        before, after = reading.tape.values[source].shape, reading.tape.values[op.outs[0]].shape
        samples = before[0] if len(before) > 2 and len(plain.shape) == len(before) else 0
        if plain.id in asked and samples and reading.tape.values[op.outs[0]].size > samples and after[0] == samples:
            return Found(
                sites=tuple(dict.fromkeys((reading.site(op, signals.LOSS), signals.LOSS, "(model)"))),
                evidence=(
                    fact("samples", samples),
                    fact("norms", reading.tape.values[op.outs[0]].size),
                ),
                cause=f"The norm of the gradient of {before} is taken over dimension "
                f"{few([str(each) for each in op.args.get('dim') or ()])} alone{reading.where(op)}: that gives a norm "
                "for each place of a sample, and the penalty holds each of these at 1 instead of that of the sample.",
            )
    return None


_NORMS: Final = ("linalg_vector_norm", "norm")


def _asks_inputs(mark: Mark) -> bool:
    return bool(mark.data.get("create_graph")) and bool(mark.data.get("inputs"))


def _between(reading: TapeReading, mark: Mark) -> list[int]:
    """Return what the backward operations computed that follow a mark, up to the next operation of another kind."""
    found: list[int] = []
    for op in reading.tape.ops[mark.index :]:
        if op.phase != "backward":
            break
        found += op.outs
    return found


_FUSED: Final = ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")
_RECURRENT: Final = ("RNN", "LSTM", "GRU")


def _runs_along_samples(reading: TapeReading, op: Op) -> bool:
    """Return whether a recurrent layer or attention of torch's takes samples for steps."""
    if reading.is_one_sequence:
        return False
    kind = reading.kind_of(op.module)
    axes = reading.labels.axes
    if kind in _RECURRENT and (reading.labels.are_pieces or _has_own_state(reading, op.module)):
        return False
    if kind in _RECURRENT and (op.kind in _FUSED or op.kind == "unbind"):
        value = op.input("input" if op.kind in _FUSED else "self")
        label = () if value is None else reading.labels.get(value)
        at = 0 if op.kind in _FUSED else int(op.args.get("dim", 0))
        return len(label) > 1 and axes.has_samples(label[at])
    if kind != "MultiheadAttention":
        return False
    value = op.input("key") if "scaled_dot_product" in op.kind else op.input("self") if op.kind in SOFTMAXES else None
    label = () if value is None else reading.labels.get(value)
    return len(label) > 2 and axes.has_samples(label[-2 if "scaled_dot_product" in op.kind else -1])


def _has_own_state(reading: TapeReading, module: str) -> bool:
    """Return whether a recurrent layer is given a state, which the program made with a row for each of its samples."""
    for call in reading.tape.calls:
        given, state = call.args.get("[0]"), call.args.get("[1]", call.args.get("[1][0]"))
        if call.path == module and given is not None and state is not None:
            rows, states = reading.tape.values[given].shape, reading.tape.values[state].shape
            # A module of the program with the name of one of torch's may get lengths in the place of a state.
            return len(rows) > 2 and len(states) > 1 and states[-2] == rows[1] != rows[0]
    return False


def _along_samples(reading: TapeReading, op: Op) -> Found:
    kind = reading.kind_of(op.module)
    return Found(
        sites=(op.module,),
        evidence=(fact("steps that it takes the samples for", reading.count_samples()),),
        cause=f"{op.module} ({kind}) runs along the batch: it takes the axis of the samples for that of steps, so that "
        "each sample is mixed with the others.",
        fix="Create it with batch_first=True, or pass x.transpose(0, 1).",
    )


def _broken_up(reading: TapeReading, cut: Cut) -> Found:
    op = reading.tape.ops[cut.op]
    has_samples = any(map(reading.labels.axes.is_sample, cut.axes))
    what = "samples" if has_samples else "steps, heads or channels"
    sizes = sorted(reading.labels.axes.sizes[axis] for axis in cut.axes)
    return Found(
        severity="critical" if has_samples else "warning",
        sites=(reading.site(op, signals.LOSS), "(model)"),
        evidence=(fact("size of the axis that is broken up", sizes[0]),),
        cause=f"A view or reshape turns {cut.before} into {cut.after}{reading.where(op)}: it does not move axes but "
        f"regroups the elements, so that {what} get mixed. A dimension of size {sizes[0]} comes out, but it is not the "
        "axis of that size that went in.",
        refute="Compare it with .transpose or .permute on torch.arange(...): if both are equal, this finding is wrong.",
    )


def _by_sample(reading: TapeReading, op: Op, table: int) -> Found:
    about = reading.tape.values[table]
    name = about.name or "a table of the model"
    return Found(
        sites=tuple(dict.fromkeys((reading.site(op, "(model)"), about.name.rpartition(".")[0] or "(model)"))),
        evidence=(fact(f"rows of {name}", max(about.shape)),),
        cause=f"The first rows of {name} are added to the samples of the batch{reading.where(op)}, one to each: they "
        "run over the batch, not over positions.",
        fix="Slice the table by the number of positions and let it broadcast over samples: x + table[:, :x.size(1)].",
        refute="Print the shape of what is added: if the dimension of samples has size 1, this finding is wrong.",
    )


def _mismatched(reading: TapeReading, op: Op, size: int) -> Found:
    return Found(
        sites=(reading.site(op, signals.LOSS), "(model)"),
        evidence=(fact("size of the dimensions that are matched", size),),
        cause=f"`{op.function or op.kind}`{reading.where(op)} matches two dimensions of size {size} of which one runs "
        "over the samples in another order, or over something else: outputs are compared with the targets of other "
        "samples.",
        fix="Bring both into the same order of axes with transpose or permute before they are flattened.",
    )
