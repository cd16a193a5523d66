"""What a taped step shows of targets: what they are made of, and what they share with the inputs."""

from __future__ import annotations

from typing import Final

import numpy as np

from sonde.core import signals
from sonde.core.tape import Call, Op, Role
from sonde.diagnosis.rule import Found, Threshold, above, fact, on_tape
from sonde.diagnosis.tape.numbers import Numbers
from sonde.diagnosis.tape.reading import RESHAPING, TapedLoss, TapeReading

_CHOICES: Final = frozenset({"argmax", "argmin"})
_SCORES: Final = frozenset({"_softmax", "_log_softmax", "sigmoid", "log_sigmoid_forward", *RESHAPING})
MIN_SAMPLES: Final = 8
"""Fewer equal numbers may be equal by chance."""


# --------------------------------------------------------------------------------
# What targets are made of.


@on_tape
def own_answers(reading: TapeReading) -> Found | None:
    """Find a loss whose target is the largest of the very scores that it is given, and no other loss with data."""
    if not reading.losses:
        return None
    own = [loss for loss in reading.losses if _is_own(reading, loss)]
    if not own or len(own) < len(reading.losses):
        return None
    loss = own[0]
    return Found(
        sites=(signals.LOSS,),
        evidence=(fact("losses whose target is made of their own input", len(own)),),
        cause=f"The target of {loss.kind} is made of its own input{reading.where(loss.op)}: whatever the "
        "model answers counts as right.",
    )


def _is_own(reading: TapeReading, loss: TapedLoss) -> bool:
    if loss.target is None:
        return False
    if reading.plain(loss.target).id == reading.plain(loss.value).id:
        return True
    maker = reading.origin(loss.target)
    scores = None if maker is None or maker.kind not in _CHOICES else maker.input("self")
    if scores is None:
        return False
    return reading.plain(scores, _SCORES).id == reading.plain(loss.value, _SCORES).id


@on_tape
def unrelated_noise(reading: TapeReading) -> Found | None:
    """Find a target that is noise drawn for it alone, which nothing that the model sees depends on."""
    for output, target, op in reading.compared():
        source = reading.plain(target)
        maker = reading.tape.producer(source.id)
        if (
            maker is None
            or not maker.is_random
            or maker.kind.removesuffix("_") not in _NORMAL
            or source.size < MIN_SAMPLES
            or maker.input("mean") is not None  # such as an action that a policy draws around its own output
            or maker.input("std") is not None
        ):
            continue
        before = reading.tape.ancestors(output)
        # Where the model is given nothing but noise, the program tries itself out on made-up data.
        if source.id not in before and any(each.id in before for each in reading.tape.given(*_DATA)):
            return Found(
                severity="critical",
                sites=(signals.LOSS, "(data)"),
                evidence=(fact("numbers that are predicted", source.size), fact("inputs that depend on them", 0)),
                cause=f"The target is noise that is drawn for it alone{reading.where(maker)}: nothing that the model "
                "is "
                f"given depends on it{reading.where(op)}, so the target is unrelated to the input and cannot be "
                "predicted.",
                fix="Draw the noise once, and use the same tensor for the input and for the target.",
                refute="Compare the noise that is added with the target: if they are equal, this finding is wrong.",
            )
    return None


_NORMAL: Final = frozenset({"randn", "randn_like", "normal", "normal_functional"})
_DATA: Final[tuple[Role, ...]] = ("input", "target", "batch", "carried", "constant")


@on_tape
def noisy_copy(reading: TapeReading) -> Found | None:
    """Find an output that is compared with the noisy input itself, not with what the noise was added to."""
    inputs = list(reading.tape.inputs_of_root())
    joined = [maker for value in inputs if (maker := reading.tape.producer(value)) is not None and maker.kind == "cat"]
    given = {reading.plain(value).id for value in (*inputs, *(part for maker in joined for _, part in maker.inputs()))}
    for _, target, op in reading.compared():
        source = reading.plain(target)
        maker = reading.tape.producer(source.id)
        if source.id not in given or maker is None or maker.kind.removesuffix("_") not in ("add", "mul", "sub"):
            continue
        parts = [value for _, value in maker.inputs()]
        is_sum = not maker.kind.startswith("mul")
        drawn = [_is_drawn(reading, each) or (is_sum and _is_scaled_noise(reading, each)) for each in parts]
        if len(parts) == 2 and sum(drawn) == 1:
            return Found(
                sites=(signals.LOSS, "(data)"),
                evidence=(fact("numbers that are both input and target", source.size),),
                cause=f"The target is the input of the model{reading.where(op)}, to which noise was added"
                f"{reading.where(maker)}: the model learns to copy its input, noise included. The clean data was "
                "meant.",
                fix="Compare the output with the data before the noise was added.",
                refute="If the model should reproduce the noise, this finding is wrong.",
            )
    return None


@on_tape
def given_answer(reading: TapeReading) -> Found | None:
    """Find tokens that a model gets beside others, and is asked for at the same positions."""
    for call in reading.tape.root_calls():
        given = {value: reading.numbers.of(value) for value in call.args.values() if _is_tokens(reading, value)}
        known = {value: content for value, content in given.items() if content is not None}
        # Beside a mask, or the numbers of two segments, the tokens may be those of an autoencoder.
        words = [
            each for each, content in known.items() if np.unique(content).size > 2 and _embeds(reading, call, each)
        ]
        for loss in reading.losses if len(known) == len(given) and len(words) >= 2 else ():
            wanted = None if loss.target is None else reading.numbers.of(loss.target)
            same = [each for each in words if wanted is not None and _are_same(known[each], wanted)]
            if len(same) == 1 and call.last <= loss.op.index:
                return Found(
                    sites=(signals.LOSS, "(loop)", "(data)"),
                    evidence=(fact("tokens that are both given and asked for", known[same[0]].size),),
                    cause=f"{call.path} gets the very tokens that its outputs are compared with at the same positions"
                    f"{reading.where(loss.op)}: it only learns to copy them. The next tokens were meant.",
                    fix="Give it the tokens without the last, tokens[:, :-1], and ask for those after, tokens[:, 1:].",
                    refute="Compare the argument with the target: if they differ anywhere, this finding is wrong.",
                )
    return None


def _embeds(reading: TapeReading, call: Call, tokens: int) -> bool:
    """Return whether a call looks up these tokens as they are; many models shift their labels themselves."""
    looked_up = (op.input("indices") for op in reading.tape.ops[call.first : call.last] if op.kind == "embedding")
    return any(each is not None and reading.plain(each).id == reading.plain(tokens).id for each in looked_up)


def _is_tokens(reading: TapeReading, value: int) -> bool:
    about = reading.tape.values[value]
    return about.dtype == "int64" and len(about.shape) == 2 and about.shape[1] > 1


def _are_same(given: Numbers, wanted: Numbers) -> bool:
    return given.size == wanted.size >= MIN_SAMPLES and bool((given.reshape(-1) == wanted.reshape(-1)).all())


KEPT = Threshold(0.7, "smallest share of the data in a noisy sample: a schedule ends where next to nothing is left")


@on_tape
def weak_noise(reading: TapeReading) -> Found | None:
    """Find noisy samples, mixed by a schedule at random times, that are mostly data at every time."""
    # A model may add the noise itself, before it calls the network that removes it.
    inputs = {reading.plain(value).id for call in reading.tape.calls for value in call.args.values()}
    for value in sorted(inputs):
        op = reading.tape.producer(value)
        parts = [] if op is None or op.kind != "add" else [each for _, each in op.inputs()]
        noise = [each for each in parts if _is_scaled_noise(reading, each)]
        clean = [reading.tape.producer(each) for each in parts if each not in noise]
        if len(parts) != 2 or len(noise) != 1 or clean[0] is None or clean[0].kind != "mul":
            continue
        shares = [
            each for _, each in clean[0].inputs() if reading.tape.values[each].size < reading.tape.values[value].size
        ]
        content = reading.numbers.of(shares[0]) if len(shares) == 1 and _is_by_time(reading, shares[0]) else None
        if content is None or content.size < 2 * MIN_SAMPLES or np.unique(content).size < MIN_SAMPLES:
            continue
        if float(content.min()) > KEPT and float(content.max()) <= 1:
            return Found(
                sites=("(data)", signals.LOOP, signals.LOSS),
                evidence=(above("smallest share of the data in a noisy sample", float(content.min()), KEPT),),
                cause=f"Noisy samples hold at least {content.min():.0%} of the data at every time of the schedule"
                f"{reading.where(op)}: the model never sees the noise that sampling starts from. Its factors are those "
                "of single steps, not of all steps up to a time, or all steps together add too little noise.",
                fix="Index the product of all alphas: torch.cumprod(1 - betas, 0)[t]. If it is that product, take more "
                "steps or larger betas, until it ends near 0.",
                refute="Print the factor of the data at the last time: if it is near 0, this finding is wrong.",
            )
    return None


def _is_by_time(reading: TapeReading, value: int) -> bool:
    """Return whether a factor is looked up in a table at times that are drawn."""
    kinds = {op.kind for op in reading.makers(value)}
    return not kinds.isdisjoint({"index", "gather", "index_select"}) and any(map(_is_whole_draw, kinds))


def _is_whole_draw(kind: str) -> bool:
    return kind.startswith("randint")


def _is_scaled_noise(reading: TapeReading, value: int) -> bool:
    """Return whether a value is noise of its own shape times something, as the schedule of a diffusion."""
    about, op = reading.plain(value), reading.tape.producer(reading.plain(value).id)
    if op is None or op.kind.removesuffix("_") != "mul":
        return op is not None and op.is_random and op.kind.removesuffix("_") in _NORMAL
    same = [each for _, each in op.inputs() if reading.tape.values[each].shape == about.shape]
    return any(_is_scaled_noise(reading, each) for each in same)


def _is_drawn(reading: TapeReading, value: int) -> bool:
    """Return whether a value is made of random draws alone."""
    within = reading.tape.ancestors(value, through=lambda op: not op.is_random)
    has_data = any(reading.tape.values[each].is_given and reading.tape.values[each].size > 1 for each in within)
    return not has_data and any(op.is_random for op in reading.makers(value, lambda op: not op.is_random))


@on_tape
def read_ahead(reading: TapeReading) -> Found | None:
    """Find a decoder that reads at every step the very number that it is to predict there."""
    targets = {reading.plain(target).id: (output, op) for output, target, op in reading.compared()}
    for call in reading.tape.calls:
        given, steps = call.args.get("[0]"), call.outs.get("[0]")
        state = call.args.get("[1]", call.args.get("[1][0]"))
        if call.kind not in RECURRENT or given is None or state is None or steps is None:
            continue
        output, op = targets.get(reading.plain(given).id, (None, None))
        if op is None or output is None or state not in reading.learnt or steps not in reading.tape.ancestors(output):
            continue
        between = {each.kind for each in reading.tape.path(steps, output)}
        if between.isdisjoint(_ENDS_STEPS) and reading.tape.values[given].size > MIN_SAMPLES:
            return Found(
                severity="critical",
                sites=(call.path, "(data)", signals.LOSS),
                evidence=(fact("numbers that are input and target of the same step", reading.tape.values[given].size),),
                cause=f"{call.path} ({call.kind}) starts from the state of another layer and reads at every step the "
                f"number that it is to predict there{reading.where(op)}: the target leaks into the input, and is not "
                "known when one forecasts.",
                fix="Give it the values of the steps before: torch.cat([last_known, target[:, :-1]], 1).",
                refute="Compare its input with the target of the same step: if they differ, this finding is wrong.",
            )
    return None


RECURRENT: Final = ("RNN", "LSTM", "GRU")
_ENDS_STEPS: Final = frozenset({"select", "mean", "sum", "max", "amax", "index", "index_select", "gather", "slice"})


@on_tape
def within_input(reading: TapeReading) -> Found | None:
    """Find a target that is one of the numbers which the model is given.

    A target that the step itself takes from the input is intended, as where a part of it is to be reproduced.
    """
    inputs = [(value, reading.numbers.of(value)) for value in reading.tape.inputs_of_root()]
    for _, target, op in reading.compared():
        wanted = reading.numbers.of(target)
        if wanted is None or wanted.dtype.kind != "f" or not wanted.shape or wanted.size != len(wanted):
            continue
        for value, given in inputs:
            place = _column(given, wanted)
            if place is not None and value not in reading.tape.ancestors(target):
                return _contained(reading, op, place, wanted.size)
    return None


def _column(given: Numbers | None, wanted: Numbers) -> int | None:
    """Return the place within the input of each sample at which the target stands, if there is one for all samples."""
    count = wanted.size
    if given is None or given.dtype.kind != "f" or given.ndim < 2 or len(given) != count or count < MIN_SAMPLES:
        return None
    rows, column = given.reshape(count, -1), wanted.reshape(count, 1)
    if rows.shape[1] < 2 or np.unique(column).size < MIN_SAMPLES / 2:
        return None
    equal = (rows == column).all(axis=0)
    return int(np.argmax(equal)) if equal.any() else None


def _contained(reading: TapeReading, op: Op, place: int, count: int) -> Found:
    return Found(
        severity="critical",
        sites=("(data)", "loader", signals.LOSS),
        evidence=(fact("samples whose target is in their input", count), fact("at place", place)),
        cause=f"The target of every sample is number {place} of its input{reading.where(op)}: the answer is part of "
        "the "
        "input, and the model learns to repeat it. An index may be off by one.",
        fix="Take the target from outside the input, as from the steps after the window.",
        refute="Print an input beside its target: if the target does not occur in it, this finding is wrong.",
    )


@on_tape
def corners_as_sizes(reading: TapeReading) -> Found | None:
    """Find boxes (x0, y0, x1, y1) that are taken for (centre, size), or the other way round."""
    for op in reading.tape.ops:
        pair = reading.pair(op) if op.kind in ("sub", "add") and op.phase != "optimizer" else None
        boxes = None if pair is None else _boxes(reading, *pair)
        if boxes is None or not _leads_to(reading, op):
            continue
        starts, ends, is_half = boxes
        if len(starts) < MIN_SAMPLES:
            continue
        if is_half and (ends > starts).all() and _leave_the_picture(starts, ends):
            return _box_format(reading, op, "two corners", "centre and size")
        if not is_half and op.kind == "sub" and (ends < starts).any(axis=1).mean() > 1 / 2:
            return _box_format(reading, op, "centre and size", "two corners")
    return None


OUTSIDE = Threshold(0.1, "share of boxes beyond the edge of the picture: more than single annotations")


def _leave_the_picture(centres: Numbers, sizes: Numbers) -> bool:
    """Return whether boxes end beyond the edge of their picture; of one that is measured in pixels, beyond 0."""
    low, high = centres - sizes / 2, centres + sizes / 2
    beyond = (low < -0.02 * sizes.max()) | ((high > 1.02) & (sizes.max() <= 1))
    return bool(beyond.any(axis=1).mean() > OUTSIDE)


def _boxes(reading: TapeReading, one: int, other: int) -> tuple[Numbers, Numbers, bool] | None:
    """Return both halves of boxes that an operation combines, and whether it takes half of the second."""
    (first, one_factor), (second, factor) = (reading.unscaled(each, _NO_CARRIER) for each in (one, other))
    cuts = [reading.tape.producer(each.id) for each in (first, second)]
    sources = {cut.input("self") for cut in cuts if cut is not None and cut.kind in ("slice", "select", "unbind")}
    source = next(iter(sources), None)
    content = None if source is None or len(sources) > 1 else reading.numbers.of(source)
    halves = [reading.numbers.of(each.id) for each in (first, second)]
    if content is None or content.ndim != 2 or content.shape[1] != 4 or source in reading.learnt or one_factor != 1:
        return None
    if halves[0] is None or halves[1] is None:
        return None
    one_half, two_half = (each.reshape(len(content), -1) for each in halves if each is not None)
    for at in range(2):
        width = one_half.shape[1]
        starts, ends = content[:, at : at + width], content[:, at + 2 : at + 2 + width]
        if np.array_equal(one_half, ends) and np.array_equal(two_half, starts) and factor == 1:  # x1 - x0
            return starts, ends, False
        if np.array_equal(one_half, starts) and np.array_equal(two_half, ends) and factor == 0.5:
            return starts, ends, True
    return None


_NO_CARRIER: Final[frozenset[str]] = frozenset()


def _leads_to(reading: TapeReading, op: Op) -> bool:
    return not reading.needed.isdisjoint(op.outs)


def _box_format(reading: TapeReading, op: Op, are: str, taken: str) -> Found:
    return Found(
        sites=(signals.LOSS, "(data)"),
        evidence=(fact("boxes", reading.tape.values[op.outs[0]].shape[0]),),
        cause=f"The boxes of the targets are {are}, and are taken for {taken}{reading.where(op)}: what comes out are "
        "not boxes of the picture.",
        fix="Convert them first, as torchvision.ops.box_convert does, or change the format of the labels.",
        refute="Draw ten targets on their pictures: if the boxes fit, this finding is wrong.",
    )
