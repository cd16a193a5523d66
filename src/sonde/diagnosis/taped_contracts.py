"""What functions of torch expect of their arguments, compared with what a taped step gave them.

Torch's documentation states these expectations; nothing checks them, and a violation raises no error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from sonde.core import signals
from sonde.core.tape import Op
from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Found, fact
from sonde.diagnosis.tape_reading import TapeReading

_SIGNS: Final = frozenset({"cosine_embedding_loss", "hinge_embedding_loss", "margin_ranking_loss", "soft_margin_loss"})
"""Losses whose targets are -1 and 1."""


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of one of torch's functions: its operations, and the values it was given."""

    function: str
    ops: tuple[Op, ...]
    given: tuple[int, ...]


def calls_of(reading: TapeReading, functions: frozenset[str]) -> Iterator[FunctionCall]:
    """Yield the calls of some functions that what is minimised depends on."""
    group: list[Op] = []
    for op in (*reading.forward_ops(), None):
        same = op is not None and group and (op.function, op.line) == (group[-1].function, group[-1].line)
        if group and not same:
            made = {out for each in group for out in (*each.outs, *each.writes)}
            given = dict.fromkeys(value for each in group for _, value in each.inputs() if value not in made)
            yield FunctionCall(group[0].function, tuple(group), tuple(given))
            group = []
        if op is not None and op.function in functions:
            group.append(op)


def wrong_convention(case: Case) -> Found | None:
    """Find targets that a loss takes for something else than what they mean."""
    reading = case.taped
    if reading is None:
        return None
    return _not_signs(reading) or _blank_as_label(reading)


def _not_signs(reading: TapeReading) -> Found | None:
    for call in calls_of(reading, _SIGNS):
        for value in call.given:
            about = reading.tape.values[value]
            content = None if about.requires_grad or not about.shape else reading.numbers.of(value)
            if content is None or about.size < 2:
                continue
            odd = np.unique(content[~np.isin(content, (-1, 1))])
            if not len(odd):
                continue
            return Found(
                step=reading.tape.step,
                sites=(signals.LOSS, "(data)"),
                evidence=(
                    fact("targets that are neither -1 nor 1", int((~np.isin(content, (-1, 1))).sum())),
                    fact("one of them", float(odd[0])),
                ),
                cause=f"{call.function} expects targets -1 and 1, but gets "
                f"{float(odd[0]):g}{reading.where(call.ops[0])}: "
                "pairs with another target have no loss, or the wrong one.",
                fix="Map the targets to -1 and 1, as in 2 * target - 1.",
                refute="Print target.unique(): if it holds -1 and 1 only, this finding is wrong.",
            )
    return None


def _blank_as_label(reading: TapeReading) -> Found | None:
    for op in reading.forward_ops():
        targets = op.input("targets")
        content = None if op.kind != "_ctc_loss" or targets is None else reading.numbers.of(targets)
        if content is None:
            continue
        blank = int(op.args.get("blank", 0))
        lengths = op.input("target_lengths")
        sizes = reading.numbers.of(lengths) if lengths is not None else np.asarray(op.args.get("target_lengths"))
        if content.ndim == 2 and sizes is not None:
            content = content[np.arange(content.shape[1]) < np.reshape(sizes, (-1, 1))]
        count = int((content == blank).sum())
        if count:
            return Found(
                step=reading.tape.step,
                sites=(signals.LOSS, "(data)"),
                evidence=(fact("labels that are the blank", count), fact("labels", content.size)),
                cause=f"{count} labels are {blank}, which ctc_loss takes for the blank{reading.where(op)}: a label "
                "that is "
                "the blank cannot be distinguished from silence.",
                fix="Count labels from 1 and leave 0 to the blank, or set blank to a number that no label has.",
                refute="Print (targets == blank).sum() within the target lengths: if it is 0, this finding is wrong.",
            )
    return None


def one_class(case: Case) -> Found | None:
    """Find a softmax over a single class, which is always 1."""
    reading = case.taped
    if reading is None:
        return None
    for op in reading.forward_ops():
        value = op.input("self")
        if op.kind not in ("_log_softmax", "_softmax") or value is None or op.module not in ("", "<CrossEntropyLoss>"):
            continue
        shape = reading.tape.values[value].shape
        if len(shape) > 1 and shape[int(op.args["dim"])] == 1 and value in reading.learning:
            return Found(
                step=reading.tape.step,
                sites=(signals.LOSS, "(model)"),
                evidence=(fact("classes", 1), fact("samples", shape[0])),
                cause=f"{op.function or 'softmax'} gets a single output of shape {shape}{reading.where(op)}: a "
                "softmax over "
                "one class is always 1, so the loss is constant and nothing is learnt.",
                fix="Use binary_cross_entropy_with_logits for one output, or give the last layer one output per class.",
                refute="Print the shape of the output: if its class dimension is larger than 1, this finding is wrong.",
            )
    return None


def exclusive_labels(case: Case) -> Found | None:
    """Find labels that may be true together, compared with the outputs of a softmax, which add up to 1."""
    reading = case.taped
    if reading is None:
        return None
    for loss in reading.losses:
        maker = reading.origin(loss.value)
        if loss.kind != "binary_cross_entropy" or maker is None or maker.kind != "_softmax" or loss.target is None:
            continue
        target, dim = reading.numbers.of(loss.target), int(maker.args["dim"])
        if target is None or target.shape != reading.tape.values[maker.outs[0]].shape:
            continue
        sums = target.sum(axis=dim)
        if (sums > 1).any():
            return Found(
                severity="critical",
                step=reading.tape.step,
                sites=tuple(dict.fromkeys((reading.site(maker, signals.LOSS), signals.LOSS))),
                evidence=(fact("most labels of one sample", float(sums.max())), fact("sum of its outputs", 1.0)),
                cause=f"Samples have up to {sums.max():g} labels, but the outputs come from a "
                f"softmax{reading.where(maker)} "
                "and add up to 1: labels that are not exclusive cannot be high together.",
                fix="Use a sigmoid for each label: binary_cross_entropy_with_logits of the scores before the softmax.",
                refute="Print target.sum(1).max(): if it is 1, this finding is wrong.",
            )
    return None


_UNSIGNED: Final = ("uint8", "uint16", "uint32", "uint64")


def wrapped_around(case: Case) -> Found | None:
    """Find a subtraction of unsigned integers whose result would be negative."""
    reading = case.taped
    if reading is None:
        return None
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
                step=reading.tape.step,
                sites=("(data)",),
                evidence=(fact("numbers that wrap around", wrapped), fact("numbers", size)),
                cause=f"{wrapped / size:.0%} of the numbers wrap around{reading.where(op)}: "
                f"{reading.tape.values[out].dtype} "
                "has no negative numbers, and a subtraction below 0 ends near its largest.",
                fix="Convert to float before subtracting: x.float() - mean.",
                refute="Print the dtype on that line: if it is signed or a float, this finding is wrong.",
            )
    return None
