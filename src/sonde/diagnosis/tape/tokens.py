"""What a taped step shows of tokens: how far targets lie ahead of what the model reads, and what is padding."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sonde.core import signals
from sonde.core.tape import Op, number
from sonde.diagnosis.rule import Found, fact, on_tape
from sonde.diagnosis.tape.data import padding_of
from sonde.diagnosis.tape.numbers import Numbers
from sonde.diagnosis.tape.reading import CARRIERS, TapedLoss, TapeReading
from sonde.diagnosis.tape.targets import MIN_SAMPLES, RECURRENT

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


def reads_and_predicts(reading: TapeReading) -> bool:
    """Return whether a step reads one series of tokens and all its targets are the next ones of it."""
    return len(list(_tokens(reading))) == 1 and shifts(reading).keys() == {1}


def _tokens(reading: TapeReading) -> Iterator[Numbers]:
    seen = set()
    for op in reading.forward_ops:
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
# Padding.


@on_tape
def read_after_padding(reading: TapeReading) -> Found | None:
    """Find that most outputs of a recurrent layer are read at a position that is padding."""
    padding = padding_of(reading)
    if not padding:
        return None
    for op in reading.forward_ops:
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
