"""What a taped step shows of targets: what they are made of, and what they share with the inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.core import signals
from sonde.core.tape import Op, Role, Value, number, references
from sonde.diagnosis.rule import Found, Threshold, above, below, fact, on_tape
from sonde.diagnosis.tape.contracts import arguments
from sonde.diagnosis.tape.data import padding_of
from sonde.diagnosis.tape.numbers import MAX_ELEMENTS, Numbers, TapedNumbers
from sonde.diagnosis.tape.reading import CARRIERS, RESHAPING, TapedLoss, TapeReading

_CHOICES: Final = frozenset({"argmax", "argmin"})
_SCORES: Final = frozenset({"_softmax", "_log_softmax", "sigmoid", "log_sigmoid_forward", *RESHAPING})
MIN_SAMPLES: Final = 8
"""Fewer equal numbers may be equal by chance."""


# --------------------------------------------------------------------------------
# Tokens: how far targets lie ahead of what the model reads.


def shifts(reading: TapeReading) -> dict[int, tuple[int, Op]]:
    """Return by how many positions the targets of losses lie ahead of the tokens that the model reads.

    By shift: how many targets there are, and the loss. Only where all targets are found in the tokens.
    """
    found: dict[int, tuple[int, Op]] = {}
    read = list(_tokens(reading))
    for loss in reading.losses:
        if loss.kind not in ("cross_entropy", "nll_loss") or loss.target is None:
            continue
        target = reading.numbers.of(loss.target)
        if target is None or target.dtype.kind not in "iu":
            continue
        for tokens in read:
            start = _start(reading, loss, tokens)
            shift = None if start is None else _shift(target, tokens, start, loss)
            if shift is not None:
                found.setdefault(shift, (int(target.size), loss.op))
    return found


def _tokens(reading: TapeReading) -> Iterator[Numbers]:
    seen = set()
    for op in reading.forward_ops():
        value = op.input("indices") if op.kind == "embedding" else None
        is_one_hot = op.kind == "scatter_" and number(op.args.get("value")) == 1
        if is_one_hot:
            value = op.input("index")
        content = None if value is None or value in seen else reading.numbers.of(value)
        seen.add(value)
        if content is not None and is_one_hot:
            content = content[..., 0]
        if content is not None and content.ndim == 2 and min(content.shape) > 1 and not _are_positions(content):
            yield content


def _are_positions(tokens: Numbers) -> bool:
    return bool((tokens == tokens[:1]).all())


def _start(reading: TapeReading, loss: TapedLoss, tokens: Numbers) -> int | None:
    """Return the position of the first output that a loss uses, or None if that is unknown.

    Where the model itself makes fewer outputs than it reads tokens, as a convolution does, they may belong to any.
    """
    rows, length = tokens.shape
    value = loss.value
    op = reading.tape.producer(value)
    while op is not None and (op.kind in CARRIERS or op.kind in ("_log_softmax", "_softmax")):
        before = op.input("self")
        if before is None:
            break
        shape = reading.tape.values[before].shape
        if op.kind == "slice" and len(shape) > 2 and shape[int(op.args.get("dim", 0))] == length:
            return int(op.args.get("start") or 0)
        value, op = before, reading.tape.producer(before)
    targets = 0 if loss.target is None else reading.tape.values[loss.target].size
    return 0 if targets == rows * length else None


def _shift(target: Numbers, tokens: Numbers, start: int, loss: TapedLoss) -> int | None:
    """Return the only shift at which all targets are tokens, or None."""
    rows, length = tokens.shape
    if target.size % rows or not 1 < target.size // rows <= length:
        return None
    wanted = target.reshape(rows, -1)
    valid = (wanted != loss.op.args.get("ignore_index", -100)) & (wanted >= 0)
    fits = [shift for shift in range(-2, 4) if _fits(wanted, valid, tokens, start + shift)]
    return fits[0] if len(fits) == 1 else None


def _fits(wanted: Numbers, valid: Numbers, tokens: Numbers, first: int) -> bool:
    """Return whether targets equal the tokens from a position on; those beyond the ends are not compared."""
    at = np.arange(wanted.shape[1]) + first
    inside = (at >= 0) & (at < tokens.shape[1])
    compared = valid & inside
    if compared.sum() < max(MIN_SAMPLES, valid.sum() / 2):
        return False
    there = tokens[:, np.clip(at, 0, tokens.shape[1] - 1)]
    return bool((wanted == there)[compared].all())


@on_tape
def unshifted(reading: TapeReading) -> Found | None:
    """Find tokens that are both the input of a position and the target of the same position."""
    found = shifts(reading).get(0)
    if found is None:
        return None
    return Found(
        sites=("loader", signals.LOSS, "(model)"),
        evidence=(fact("tokens that are input and target of the same position", found[0]),),
        cause=f"The target of each position is the token that the model is given there{reading.where(found[1])}: "
        "targets "
        "are not shifted, so the model sees the answer and learns to copy its input.",
        fix="Shift them by one: inputs tokens[:, :-1], targets tokens[:, 1:].",
        refute="Compare inputs[:, 1:] with targets[:, :-1]: if they are equal, this finding is wrong.",
    )


@on_tape
def overshifted(reading: TapeReading) -> Found | None:
    """Find targets that lie two or more tokens ahead, while none is the next token.

    A target that lies behind is a task of its own: to remember what was given some steps ago.
    """
    found = shifts(reading)
    odd = [shift for shift in found if shift > 1]
    if not odd or 1 in found or 0 in found:
        return None
    count, op = found[odd[0]]
    return Found(
        sites=(signals.LOSS, "loader", "(model)"),
        evidence=(fact("positions from a token to its target", odd[0]), fact("targets", count)),
        cause=f"The target of each position is the token {odd[0]} tokens later{reading.where(op)}: labels are shifted "
        "twice, as in the data and again in the model.",
        fix="Shift once: either the data yields tokens[:, 1:] as labels, or the model shifts labels that equal its "
        "inputs.",
        refute="Compare inputs[:, 1:] with the targets of the positions before: if they are equal, this finding is "
        "wrong.",
    )


@on_tape
def wraps_around(reading: TapeReading) -> Found | None:
    """Find windows of tokens whose last target is their own first token, while the others are the next token."""
    read = list(_tokens(reading))
    for loss in reading.losses:
        target = None if loss.target is None else reading.numbers.of(loss.target)
        if target is None or loss.kind not in ("cross_entropy", "nll_loss") or target.dtype.kind not in "iu":
            continue
        for tokens in read:
            if target.size != tokens.size or len(tokens) < MIN_SAMPLES:
                continue
            wanted = target.reshape(tokens.shape)
            ahead, first = (wanted[:, :-1] == tokens[:, 1:]).all(), (wanted[:, -1] == tokens[:, 0]).all()
            if ahead and first and np.unique(tokens[:, 0]).size > 1:
                return Found(
                    sites=(signals.LOSS, "(data)", "loader"),
                    evidence=(
                        fact("windows whose last target is their own first token", len(tokens)),
                        fact("tokens of a window", tokens.shape[1]),
                    ),
                    cause="The targets wrap around: the last target of each window is the first token of the same "
                    f"window{reading.where(loss.op)}, as torch.roll or np.roll gives it, not the token that follows.",
                    fix="Take the targets from the text, one token later: text[start + 1 : start + length + 1].",
                    refute="Compare y[:, -1] with x[:, 0]: if they differ, this finding is wrong.",
                )
    return None


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
    given = {reading.plain(value).id: value for value in reading.tape.inputs_of_root()}
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


KEPT = Threshold(0.7, "smallest share of the data in a noisy sample: a schedule ends where next to nothing is left")


@on_tape
def weak_noise(reading: TapeReading) -> Found | None:
    """Find noisy samples, mixed by a schedule at random times, that are mostly data at every time."""
    inputs = {reading.plain(value).id for value in reading.tape.inputs_of_root()}
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
def crossed_rows(reading: TapeReading) -> Found | None:
    """Find targets of samples that the model was not given in the same row: each row of the data is followed.

    One row of the inputs is changed, and one of the targets, and what is computed of them is computed again.
    """
    inputs = [each for each in reading.tape.inputs_of_root() if reading.tape.values[each].shape]
    firsts = {reading.tape.values[each].shape[0] for each in inputs}
    rows = firsts.pop() if len(firsts) == 1 else 0
    pairs = [
        (target, op)
        for output, target, op in _judged(reading)
        if all(reading.tape.values[each].shape[:1] == (rows,) for each in (output, target))
    ]
    targets = [target for target, _ in pairs if not _is_modelled(reading, target)]
    if rows < MIN_FOLLOWED or not inputs or not targets or _reorders_outputs(reading, rows):
        return None
    for given, wanted in _tables(reading, inputs, targets):
        moved = [
            (_moved_rows(reading, given, row, inputs), _moved_rows(reading, wanted, row, targets))
            for row in _used_rows(reading, given, rows)
        ]
        known = [(one, two) for one, two in moved if one and two]
        wrong = [two - one for one, two in known if two - one]
        if len(known) >= MIN_FOLLOWED and len(wrong) > len(known) / 2:
            return Found(
                severity="critical",
                sites=(signals.LOSS, "(data)"),
                evidence=(fact("rows that were followed", len(known)), fact("with targets elsewhere", len(wrong))),
                cause=f"Inputs and targets are taken in different orders{reading.where(pairs[0][1])}: of {len(known)} "
                f"samples that were followed through the step, {len(wrong)} are the target of rows that the model was "
                "not given them in. Labels do not belong to their inputs.",
                fix="Use one index, or one permutation, for inputs and targets.",
                refute="Print both indices: if they are equal, this finding is wrong.",
            )
    return None


MIN_FOLLOWED: Final = 4
_MOST_FOLLOWED: Final = 8
_DATA_ROLES: Final = ("batch", "input", "target", "constant", "carried")


def _is_modelled(reading: TapeReading, value: int) -> bool:
    """Return whether a value was computed by a network, as the value of a next state is."""
    return any(op.module for op in reading.makers(value))


def _judged(reading: TapeReading) -> Iterator[tuple[int, int, Op]]:
    """Yield what is compared: also a log-softmax that is multiplied by soft labels."""
    yield from reading.compared()
    for op in reading.forward_ops():
        pair = [each for each in (op.input("self"), op.input("other")) if each is not None]
        if op.kind == "mul" and not op.module and len(pair) == 2:
            one, two = sorted(pair, key=lambda each: not reading.tape.values[each].requires_grad)
            maker = reading.origin(one)
            is_pair = reading.tape.values[one].requires_grad and not reading.tape.values[two].requires_grad
            if is_pair and maker is not None and maker.kind == "_log_softmax":
                yield one, two, op


def _tables(reading: TapeReading, inputs: list[int], targets: list[int]) -> Iterator[tuple[int, int]]:
    """Yield data that inputs are computed of, and other data of as many rows that targets are."""
    one, two = (
        [
            reading.tape.values[each]
            for each in sorted(reading.tape.ancestors(values))
            if reading.tape.values[each].is_given
            and reading.tape.values[each].role in _DATA_ROLES
            and reading.tape.values[each].saved
            and reading.tape.values[each].dtype != "bool"
            and not _is_index(reading, each)
        ]
        for values in (inputs, targets)
    )
    shared = {each.id for each in one} & {each.id for each in two}
    for given in one:
        for wanted in two:
            if not shared and given.shape[:1] == wanted.shape[:1] and given.shape and given.shape[0] >= MIN_FOLLOWED:
                yield given.id, wanted.id


def _is_index(reading: TapeReading, value: int) -> bool:
    after = reading.tape.descendants(value, through=lambda op: op.kind in (*RESHAPING, "slice", "select", "unbind"))
    return any(
        each in references(op.args.get(name))
        for each in after
        for op in reading.tape.consumers(each)
        for name in ("indices", "index")
    )


def _used_rows(reading: TapeReading, given: int, rows: int) -> list[int]:
    """Return some rows of data that the step uses."""
    count = reading.tape.values[given].shape[0]
    if count <= rows:
        return list(range(min(count, _MOST_FOLLOWED)))
    for op in reading.tape.consumers(given):
        chosen = [each for name in ("indices", "index") for each in references(op.args.get(name))]
        content = reading.numbers.of(chosen[0]) if len(chosen) == 1 else None
        if content is not None and content.dtype.kind in "iu" and content.ndim == 1:
            return [int(each) for each in np.unique(content)[:_MOST_FOLLOWED]]
    return []


def _moved_rows(reading: TapeReading, given: int, row: int, values: list[int]) -> set[int]:
    """Return the rows of some values that change with one row of data; none if that cannot be computed."""
    content = reading.tape.tensor(given)
    if content is None or content.size > MAX_ELEMENTS:
        return set()
    differs = (content != content[row]).reshape(len(content), -1).any(axis=1)
    changed = np.array(content)
    changed[row] = content[int(differs.argmax())]  # a row that occurs: a number that does not may be out of range
    again = TapedNumbers(reading.tape, {given: changed})
    found: set[int] = set()
    for value in values:
        if given not in reading.tape.ancestors(value):
            continue
        one, two = reading.numbers.of(value), again.of(value)
        if one is None or two is None:
            return set()
        is_same = np.isclose(one, two, rtol=1e-4, atol=1e-7, equal_nan=True)  # what was saved was rounded otherwise
        found |= set(np.flatnonzero((~is_same).reshape(len(one), -1).any(axis=1)).tolist())
    return found


def _reorders_outputs(reading: TapeReading, rows: int) -> bool:
    """Return whether rows of outputs are taken by an index on their way to the loss."""
    after = reading.tape.descendants(reading.tape.outputs_of_root(), through=lambda op: not op.in_model)
    return any(
        op.kind in ("index", "index_select", "sort", "topk", "cat") and op.input("self") in after and not op.in_model
        for op in reading.forward_ops()
    )


SURE = Threshold(4.0, "standard errors below the agreement that the second target claims: by chance in 1 of 30,000")


@on_tape
def disagreeing_targets(reading: TapeReading) -> Found | None:
    """Find classes and probabilities for the same samples that agree no better than by chance.

    Probabilities claim how often they are right; rows of another order are right as often as a guess.
    """
    labels = [loss for loss in reading.losses if loss.kind == "cross_entropy" and loss.target is not None]
    answers = set(reading.tape.outputs_of_root())
    for given in arguments(reading):
        if given.role != "target" or given.function not in ("kl_div", "cross_entropy") or len(given.shape) != 2:
            continue
        chances = given.numbers
        own = set() if given.other is None else answers & reading.tape.ancestors(given.other)
        for loss in labels if chances is not None and chances.dtype.kind == "f" else ():
            op, wanted = loss.op, None if loss.target is None else reading.numbers.of(loss.target)
            if chances is None or wanted is None or wanted.shape != chances.shape[:1] or wanted.min() < 0:
                continue
            if not own or own != answers & reading.tape.ancestors(loss.value):
                continue  # of other samples
            guess, claimed = chances.argmax(axis=1), chances.max(axis=1)
            right, spread = (guess == wanted).mean(), np.sqrt((claimed * (1 - claimed)).sum()) / len(wanted)
            classes = np.arange(chances.shape[1])
            chance = float(((guess[:, None] == classes).mean(axis=0) * (wanted[:, None] == classes).mean(axis=0)).sum())
            error = float(np.sqrt(chance * (1 - chance) / len(wanted)))
            if right > chance + 2 * error or claimed.mean() - right < SURE * max(float(spread), error):
                continue
            return Found(
                severity="critical",
                sites=(signals.LOSS, "(data)", signals.LOOP),
                evidence=(
                    fact("share of samples in which both targets agree", float(right)),
                    fact("share by chance", chance),
                    fact("share that the probabilities claim", float(claimed.mean())),
                ),
                cause=f"Two targets of the same samples do not belong together: labels{reading.where(op)} and "
                f"probabilities{reading.where(given.op)} agree in {right:.0%} of the samples, as by chance, though the "
                f"probabilities claim {claimed.mean():.0%}. They come from different orders of the data.",
                fix="Compute them for the batch at hand, or look them up by the index of each sample.",
                refute="Compare the largest probability of ten samples with their labels: if they agree, this "
                "finding is wrong.",
            )
    return None


LOCATED = Threshold(4.0, "standard errors by which edges of a mask fit those of its picture better than noise")
SHARP = Threshold(0.3, "correlation of these edges where they fit best: what a mask marks can be seen in its picture")
STAYS = Threshold(0.75, "share of masks that fit where they lie, each at least as well as this share of its best fit")
_MOST_PICTURES: Final = 16
_LARGEST: Final = 1 << 16


@on_tape
def misaligned(reading: TapeReading) -> Found | None:
    """Find masks that fit their own pictures, but moved or mirrored, as where both are cropped or flipped apart."""
    for output, target, op in reading.compared():
        masks = _masks_of(reading, target)
        if masks is None:
            continue
        before, used = reading.tape.ancestors(target), reading.tape.ancestors(output)
        for value in reading.tape.inputs_of_root():
            shape = reading.tape.values[value].shape
            if len(shape) != 4 or (shape[0], *shape[2:]) != masks.shape or value in before or value not in used:
                continue  # of another of the batches of a step
            pictures = reading.numbers.of(value)
            found = None if pictures is None or pictures.dtype.kind != "f" else _displaced(pictures, masks)
            if found is not None:
                return Found(
                    severity="critical",
                    sites=("(data)", "loader", signals.LOSS),
                    evidence=(
                        fact("share of masks that fit best where they lie", found[0]),
                        fact("correlation of their edges with the picture where they lie", found[1]),
                        fact("correlation moved or mirrored", found[2]),
                    ),
                    cause=f"Pictures and masks do not lie on each other{reading.where(op)}: {1 - found[0]:.0%} of the "
                    "masks fit their pictures better if they are moved or mirrored. Both were cropped or flipped "
                    "apart, so labels do not belong to their pixels.",
                    fix="Draw the random crop or flip once, and apply it to picture and mask.",
                    refute="Draw ten masks over their pictures: if they fit, this finding is wrong.",
                )
    return None


def _masks_of(reading: TapeReading, target: int) -> Numbers | None:
    """Return targets that mark some pixels of each picture, as 0 and 1."""
    content = reading.numbers.of(target)
    if content is None or content.ndim not in (3, 4) or (content.ndim == 4 and content.shape[1] != 1):
        return None
    marks: Numbers = (content.reshape(len(content), *content.shape[-2:]) > 0).astype(np.float64)
    is_binary = content.dtype.kind in "iub" or np.unique(content).size == 2
    is_usable = len(marks) >= MIN_SAMPLES and min(marks.shape[1:]) >= MIN_SAMPLES and marks[0].size <= _LARGEST
    return marks if is_binary and is_usable and 0 < marks.mean() < 1 else None


def _displaced(pictures: Numbers, masks: Numbers) -> tuple[float, float, float] | None:
    """Return the share of masks that fit where they lie, how well they do, and how well where they fit best."""
    chosen = np.flatnonzero(masks.any(axis=(1, 2)) & ~masks.all(axis=(1, 2)))[:_MOST_PICTURES]
    if len(chosen) < MIN_SAMPLES:
        return None
    pictures, masks = np.asarray(pictures[chosen], np.float64), masks[chosen]
    edges, marks = _edges(pictures.mean(axis=1)), _edges(masks)
    own = _fits_at(edges, marks)
    near = np.max([np.roll(own, (row, column), (1, 2))[:, 0, 0] for row in (-1, 0, 1) for column in (-1, 0, 1)], axis=0)
    mirrored = [_fits_at(edges, each)[:, 0, 0] for each in (marks[:, ::-1], marks[:, :, ::-1])]
    best = np.maximum(own.max(axis=(1, 2)), np.max(mirrored, axis=0))
    noise = np.random.default_rng(0).permuted(edges.reshape(len(edges), -1), axis=1).reshape(edges.shape)
    gain = best - _fits_at(noise, marks).max(axis=(1, 2))
    stays = float((near >= STAYS * best).mean())
    is_located = gain.mean() > LOCATED * gain.std() / np.sqrt(len(gain)) and best.mean() > SHARP
    return (stays, float(own[:, 0, 0].mean()), float(best.mean())) if is_located and stays < STAYS else None


def _edges(pictures: Numbers) -> Numbers:
    rows, columns = np.gradient(pictures, axis=(1, 2))
    found: Numbers = np.hypot(rows, columns)
    return found


def _fits_at(pictures: Numbers, masks: Numbers) -> Numbers:
    """Return the correlation of each picture with its mask, moved by every number of rows and columns."""
    one, two = (each - each.mean(axis=(1, 2), keepdims=True) for each in (pictures, masks))
    scale = np.sqrt(np.square(one).sum(axis=(1, 2)) * np.square(two).sum(axis=(1, 2))) + 1e-12
    product = np.fft.ifft2(np.fft.fft2(one) * np.conj(np.fft.fft2(two))).real
    found: Numbers = product / scale[:, None, None]
    return found


_ORDERS: Final = frozenset({"sort", "argsort", "randperm", "topk"})


@on_tape
def reordered(reading: TapeReading) -> Found | None:
    """Find samples that are put in another order before the model, while neither targets nor outputs are."""
    for op in reading.tape.ops:
        if op.kind not in _ORDERS or op.phase not in ("forward", "between") or not op.outs:
            continue
        uses = [use for use in reading.tape.consumers(op.outs[-1]) if use.phase in ("forward", "between")]
        if not uses or not all(_takes_rows(reading, use, op.outs[-1]) for use in uses):
            continue
        moved = reading.tape.descendants([out for use in uses for out in use.outs])
        if any(target in moved for _, target, _ in reading.compared()):
            continue  # as where pairs of samples are mixed, which are compared with the targets of both
        for output, target, loss in reading.compared():
            rows = reading.tape.values[target].shape[:1]
            if output in moved and target not in moved and rows == reading.tape.values[op.outs[-1]].shape:
                return Found(
                    severity="critical",
                    sites=(signals.LOSS, "(data)", reading.site(op, signals.LOOP)),
                    evidence=(fact("samples that are put in another order", rows[0]), fact("targets that are", 0)),
                    cause=f"Samples are put in another order before the model{reading.where(op)}; neither the "
                    "outputs nor "
                    f"the targets{reading.where(loss)} are: labels do not match their samples.",
                    fix="Take the targets in the same order, or undo it on the outputs: out[order.argsort()].",
                    refute="Print the order: if it is 0, 1, 2, ..., this finding is wrong.",
                )
    return None


def _takes_rows(reading: TapeReading, op: Op, order: int) -> bool:
    """Return whether an operation takes all rows of data in some order, and nothing else uses that data."""
    source = op.input("self")
    if (
        op.kind not in ("index", "index_select")
        or source is None
        or order not in (*references(op.args.get("indices")), op.input("index"))
    ):
        return False
    about = reading.tape.values[source]
    is_all = about.shape[:1] == reading.tape.values[order].shape and not about.requires_grad
    before = reading.tape.ancestors(order)
    others = [
        each for each in reading.tape.consumers(source) if each.phase in ("forward", "between") and each is not op
    ]
    return is_all and all(before.issuperset(each.outs) for each in others)


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
def tested_in_loss(reading: TapeReading) -> Found | None:
    """Find rows of a model's output that are scored by themselves, as a test is, and are also a part of the loss.

    Where a model answers for all rows at once, as for the nodes of a graph, masks say which rows are trained on.
    """
    trained, scored = _chosen_rows(reading, in_loss=True), _chosen_rows(reading, in_loss=False)
    for size, (loss_rows, op) in trained.items():
        rows, by = scored.get(size, (np.zeros(0, bool), None))
        if by is not None and rows.any() and not (rows & ~loss_rows).any() and rows.sum() < loss_rows.sum():
            return Found(
                severity="critical",
                sites=(signals.LOSS, "(validation)", "(data)"),
                evidence=(fact("rows in the loss", loss_rows.sum()), fact("of them scored by themselves", rows.sum())),
                cause=f"{rows.sum()} rows are scored by themselves{reading.where(by)}, and all of them are among the "
                f"{loss_rows.sum()} rows of the loss{reading.where(op)}: what they show was learnt from their labels.",
                fix="Take the loss over the rows of the training set only: pred[train_mask], labels[train_mask].",
                refute="Intersect the mask of the loss with that of the test: if it is empty, this finding is wrong.",
            )
    return None


def _chosen_rows(reading: TapeReading, *, in_loss: bool) -> dict[int, tuple[NDArray[np.bool_], Op]]:
    """Return the smallest set of rows that are chosen of all outputs, for the loss or beside it, by how many there are.

    Beside the loss the rows that are chosen last count: those before are of the training set, to compare with. They may
    be rows of the outputs of the step before, with which a tape begins.
    """
    found: dict[int, tuple[NDArray[np.bool_], Op]] = {}
    answers = reading.tape.outputs_of_root(of_loss=False)
    shapes = {reading.tape.values[each].shape for each in answers}
    before = [each.id for each in reading.tape.given("carried", "constant") if each.shape in shapes]
    outputs = reading.tape.descendants([*answers, *before])
    for op in reading.tape.ops:
        source, chosen = op.input("self"), references(op.args.get("indices"))
        if op.kind != "index" or source is None or len(chosen) != 1 or op.in_model or source not in outputs:
            continue
        numbers = reading.numbers.of(chosen[0])
        count = reading.tape.values[source].shape[0]
        if numbers is None or numbers.ndim != 1 or (op.outs[0] in reading.needed) is not in_loss:
            continue
        rows = np.zeros(count, bool)
        rows[numbers] = True
        found[count] = (rows, op)
    return found


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


# --------------------------------------------------------------------------------
# Targets of reinforcement learning.

_BEST: Final = frozenset(
    {"max", "amax", "gather", "mean", "sum", "min", "minimum", *CARRIERS, "mul", "sub", "add", "detach"}
)


@on_tape
def unmasked_bootstrap(reading: TapeReading) -> Found | None:
    """Find a target that adds the value of the next state, while flags of the batch are unused, or only added."""
    for _, target, op in reading.compared():
        if reading.tape.values[target].requires_grad or not reading.is_bootstrap(target):
            continue
        if (found := _bootstrapped_ends(reading, target) or _added_ends(reading, target)) is not None:
            return found
        count = reading.tape.values[target].shape[:1]
        for value in reading.tape.values:
            if value.shape[:1] == count and value.size == count[0] and _is_idle_flag(reading, value):
                return Found(
                    sites=(signals.LOSS, signals.LOOP, "(data)"),
                    evidence=(fact("flags that nothing uses", value.size),),
                    cause=f"The target adds the value of the next state{reading.where(reading.origin(target) or op)} "
                    "also at "
                    "the end of an episode: a tensor of 0 and 1 with a number for each sample, which looks like the "
                    "done "
                    "flags of terminal states, is made and never used.",
                    fix="Multiply the value of the next state by (1 - done).",
                    refute="If the environment never ends, or the unused flags mean something else, this finding is "
                    "wrong.",
                )
    return None


ENDS = Threshold(0.35, "share of samples whose next state counts: an episode of three steps has two such states")


def _bootstrapped_ends(reading: TapeReading, target: int) -> Found | None:
    """Find a value of the next state that is multiplied by the flag of an end, not by that of going on."""
    through = frozenset({*RESHAPING, "mul", "add", "sub"})
    for value in reading.tape.ancestors(target, through=lambda op: not op.in_model and op.kind in through):
        op = reading.tape.producer(value)
        is_product = op is not None and op.kind == "mul" and _weighs_value(reading, op)
        flags = [reading.numbers.of(each) for _, each in op.inputs()] if op is not None and is_product else []
        for content in flags:
            if content is None or content.size < 2 * MIN_SAMPLES or not np.isin(content, (0, 1)).all():
                continue
            share = float(content.mean())
            if 0 < share < ENDS and op is not None:
                return Found(
                    sites=(signals.LOSS, signals.LOOP, "(data)"),
                    evidence=(below("share of samples whose next state counts", share, ENDS),),
                    cause=f"The value of the next state is multiplied by a flag that is 1 for {share:.0%} of the "
                    f"samples{reading.where(op)}: it counts at the ends of episodes, where there is none, and not "
                    "within them. The flag is the wrong way round.",
                    fix="Multiply by (1 - done).",
                    refute="Print the flag: if 1 means that the episode goes on, this finding is wrong.",
                )
    return None


def _added_ends(reading: TapeReading, target: int) -> Found | None:
    """Find flags that a target adds to the value of the next state, which nothing else takes for a factor or a mask.

    A reward may be 0 or 1 too. So there must be other data to be the reward, and the flags must have been turned
    around, as by 1 - done, or be discounted like the value, which a reward is not.
    """
    summands = _summands(reading, target, 1.0, 16)
    values = [each for each in summands if each.value in reading.of_weights]
    rows = [each for each in summands if each.value not in reading.of_weights and _is_by_sample(reading, each, target)]
    within = reading.tape.ancestors([each.value for each in values], through=lambda op: not op.in_model)
    if not values or len(rows) < 2 or any(_masks_values(reading, each) for each in within):
        return None
    for each in rows:
        base, is_turned = _before_turning(reading, each.value)
        is_discounted = 0 < abs(each.factor) < 1 and all(abs(each.factor) == abs(value.factor) for value in values)
        if not _are_flags(reading, each.value) or not (is_turned or is_discounted):
            continue
        if within.isdisjoint(reading.tape.descendants(base)):
            return Found(
                sites=(signals.LOSS, signals.LOOP, "(data)"),
                evidence=(
                    fact("flags that are added", reading.tape.values[each.value].size),
                    fact("operations that multiply or mask the value of the next state with them", 0),
                ),
                cause=f"The flags of terminal states are added to the value of the next state{reading.where(each.op)}, "
                "and neither multiply nor mask it: the target has the value of the next state also at the end of an "
                "episode, where there is none.",
                fix="Multiply the value of the next state by the flag of going on: reward + gamma * (1 - done) * "
                "next_value.",
                refute="Print the tensor of 0 and 1 that is added: if it is a reward, this finding is wrong.",
            )
    return None


@dataclass(frozen=True, slots=True)
class _Summand:
    """A value that is added to another, and the number that it is multiplied by."""

    value: int
    factor: float
    op: Op | None
    """The operation that adds it."""


def _summands(reading: TapeReading, value: int, factor: float, most: int, at: Op | None = None) -> list[_Summand]:
    """Return what a value is the sum of."""
    value = reading.plain(value).id
    op = reading.tape.producer(value)
    first = None if op is None else op.input("self")
    if op is None or first is None or most <= 0:
        return [_Summand(value, factor, at)]
    kind, second, alpha = op.kind.removesuffix("_"), op.input("other"), number(op.args.get("alpha", 1))
    if kind in ("add", "sub") and isinstance(alpha, int | float):
        turned = alpha if kind == "add" else -alpha
        other = [] if second is None else _summands(reading, second, factor * turned, most // 2, op)
        return [*_summands(reading, first, factor, most // 2, op), *other]
    if kind in ("mul", "div"):
        for one, scale in ((first, second), (second, first)):
            by = number(op.args.get("other")) if scale is None else _single(reading, scale)
            if one is not None and isinstance(by, int | float) and by and (kind == "mul" or one == first):
                return _summands(reading, one, factor * (by if kind == "mul" else 1 / by), most - 1, at)
    return [_Summand(value, factor, at)]


def _are_flags(reading: TapeReading, value: int) -> bool:
    """Return whether numbers are 0 and 1: both of them, or one in this batch and both in what it was taken of."""
    content = reading.numbers.of(value)
    if content is None or not np.isin(content, (0, 1)).all():
        return False
    source = reading.source(_before_turning(reading, value)[0])
    whole = reading.numbers.of(source.id)
    is_both = whole is not None and set(np.unique(whole)) == {0, 1}
    return bool(source.dtype == "bool" or is_both or np.unique(content).size > 1)


def _single(reading: TapeReading, value: int) -> float | None:
    content = reading.numbers.of(value) if reading.tape.values[value].size == 1 else None
    return None if content is None else float(content.reshape(()))


def _is_by_sample(reading: TapeReading, summand: _Summand, target: int) -> bool:
    about = reading.tape.values[summand.value]
    return about.size == reading.tape.values[target].size and about.size > 1


def _before_turning(reading: TapeReading, value: int) -> tuple[int, bool]:
    """Return the flags that others were made of, and whether 0 and 1 were exchanged on the way."""
    is_turned = False
    for _ in range(16):
        value = reading.plain(value).id
        op = reading.tape.producer(value)
        before = None if op is None else op.input("self")
        if op is None or before is None:
            break
        first, second = before, op.input("other")
        if op.kind == "sub" and second is not None and reading.tape.values[first].size == 1:
            before = second  # torch.tensor(1.0) - done
        elif op.kind not in _TURNS or (second is not None and op.kind != "rsub"):
            break
        value, is_turned = before, not is_turned
    return value, is_turned


_TURNS: Final = frozenset({"rsub", "logical_not", "bitwise_not"})


def _masks_values(reading: TapeReading, value: int) -> bool:
    """Return whether a value of the next state was chosen, replaced or multiplied by flags."""
    op = reading.tape.producer(value)
    if op is None or op.in_model:
        return False
    kind = op.kind.removesuffix("_")
    if kind in ("where", "masked_fill", "index_put", "index_fill", "masked_scatter", "scatter", "copy"):
        return True
    flags = [reading.numbers.of(each) for _, each in op.inputs()] if kind in ("mul", "div") else []
    return any(each is not None and each.size > 1 and np.isin(each, (0, 1)).all() for each in flags)


def _weighs_value(reading: TapeReading, op: Op) -> bool:
    """Return whether a product, or a multiple of it, has a value that was computed of weights for a factor."""
    products = [op, *(use for use in reading.tape.consumers(op.outs[0]) if use.kind == "mul")]
    return any(out in reading.of_weights for each in products for out in each.outs)


def _is_idle_flag(reading: TapeReading, value: Value) -> bool:
    if any(op.kind != "lift_fresh" for op in reading.tape.consumers(value.id)) or value.role not in (
        "constant",
        "batch",
    ):
        return False
    content = reading.numbers.of(value.id)
    return content is not None and set(np.unique(content)) <= {0, 1}


# --------------------------------------------------------------------------------
# Padding.


@on_tape
def read_after_padding(reading: TapeReading) -> Found | None:
    """Find that most outputs of a recurrent layer are read at a position that is padding."""
    padding = padding_of(reading)
    if not padding:
        return None
    for op in reading.forward_ops():
        at = _position(reading, op)
        if at is None:
            continue
        for pad in padding:
            value = reading.tape.values[op.args["self"]["v"]]
            if value.shape[:2] != pad.shape or not _follows_recurrent(reading, value.id):
                continue
            share = float(pad[np.arange(len(pad)), np.broadcast_to(at, len(pad))].mean())
            if share > 1 / 2:
                return Found(
                    severity="warning",
                    sites=(reading.site(op, "(model)"), "(model)", "(data)"),
                    evidence=(fact("share of the samples that are padding there", share),),
                    cause=f"The output of a recurrent layer is read at a position where {share:.0%} of the samples are "
                    f"padding{reading.where(op)}: what it read before has to survive all of the padding.",
                    fix="Read the output at the true length of each sample, or use pack_padded_sequence.",
                    refute="Print the tokens at that position: if they are not padding, this finding is wrong.",
                )
    return None


def _position(reading: TapeReading, op: Op) -> Numbers | int | None:
    """Return at which positions an operation takes one output of each sample."""
    value = op.input("self")
    if value is None or len(reading.tape.values[value].shape) != 3:
        return None
    if op.kind == "select" and int(op.args.get("dim", 0)) == 1:
        return int(op.args["index"])
    if op.kind == "index" and len(op.args.get("indices", ())) == 2 and None not in op.args["indices"]:
        return reading.numbers.of(op.args["indices"][1]["v"])
    return None


def _follows_recurrent(reading: TapeReading, value: int) -> bool:
    """Return whether a recurrent layer with one direction made a value."""
    op = reading.origin(value)
    while op is not None and op.kind in ("stack", "cat"):
        before = next((each for _, each in op.inputs()), None)
        op = None if before is None else reading.tape.producer(before)
    layer = next((module for module in reading.tape.modules if op is not None and module.path == op.module), None)
    return layer is not None and layer.kind in RECURRENT and not layer.settings.get("bidirectional")
