"""What a taped step shows of noise that is mixed with data: by which numbers each of the two is multiplied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from sonde.core import signals
from sonde.core.tape import Op, number
from sonde.diagnosis.rule import Found, Threshold, fact, on_tape
from sonde.diagnosis.tape.numbers import Numbers
from sonde.diagnosis.tape.reading import RESHAPING, TapeReading

ROUNDING = Threshold(1e-3, "sum of shares from 1: the rounding of half precision")
EXACT = Threshold(1e-5, "sum of shares from 1: the rounding of single precision")
INFORMATIVE = Threshold(1e-2, "number from its square: nearer to 0 or 1 a variance and its root are alike")
MANY: Final = 3
"""Different numbers that follow one rule: they come of a schedule."""
_DIGITS: Final = 3
"""Numbers of up to so many digits may have been chosen by hand."""
_NORMAL: Final = frozenset({"randn", "randn_like", "normal", "normal_functional"})
_UNIFORM: Final = frozenset({"rand", "rand_like", "uniform"})
_LINEAR: Final = frozenset({*RESHAPING, *_UNIFORM, "add", "sub", "rsub", "mul", "div", "neg", "select", "slice"})
_MOST: Final = 6
"""Factors of one product that are followed."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A value times numbers: one for each sample, or one for all."""

    value: int
    by: Numbers
    factors: tuple[int, ...] = ()
    """The tensors that it is multiplied by."""


@on_tape
def scaled_by_variance(reading: TapeReading) -> Found | None:
    """Find noisy samples a * data + b * noise that keep a variance of 1 only if b were squared, or a rooted.

    Where a model's output is multiplied by b too, as the score of a process whose deviation b is, b is meant.
    """
    noisy = reading.tape.descendants([out for op in reading.tape.ops for out in op.outs if _is_normal(reading, out)])
    wanted = {target for _, target, _ in reading.compared()}
    before = reading.tape.ancestors(wanted)
    clean = {reading.plain(target).id for target in wanted}
    for op in reading.forward_ops:
        for data, noise in _mixtures(reading, op) if not noisy.isdisjoint(op.outs) else ():
            if noise.value not in before and reading.plain(data.value).id not in clean:
                continue
            a, b = np.abs(data.by), np.abs(noise.by)
            if _adds_up(a * a, b) and not _scales_output(reading, b):
                return _found(
                    reading,
                    op,
                    a,
                    b,
                    "The noise is multiplied by its variance instead of its standard deviation",
                    "the square of the factor of the data and the factor of the noise",
                    "Multiply the noise by the root: torch.sqrt(1 - alpha_bar).",
                )
            if _adds_up(b * b, a) and np.unique(a).size >= MANY and not _is_linear(reading, data):
                return _found(
                    reading,
                    op,
                    a,
                    b,
                    "The data is multiplied by a share of the variance instead of its root",
                    "the factor of the data and the square of the factor of the noise",
                    "Multiply the data by the root: torch.sqrt(alpha_bar).",
                )
    return None


def _found(reading: TapeReading, op: Op, a: Numbers, b: Numbers, what: str, added: str, fix: str) -> Found:
    variance = a * a + b * b
    return Found(
        sites=("(data)", signals.LOOP, reading.site(op, signals.LOSS)),
        evidence=(
            fact("smallest variance of a noisy sample of data with variance 1", float(variance.min())),
            fact("largest", float(variance.max())),
        ),
        cause=f"{what}{reading.where(op)}: {added} add up to 1 for every sample, but the squares of both should, so "
        "that noisy samples have the same variance at every time.",
        fix=fix,
        refute="Print the squares of both factors: if they add up to 1, this finding is wrong.",
    )


def _adds_up(squared: Numbers, other: Numbers) -> bool:
    """Return whether a square and a number that should have been squared add up to 1, and both squares do not."""
    squared, other = np.broadcast_arrays(squared, other)
    differs = np.abs(other - other * other) > INFORMATIVE
    error = float(np.abs(squared + other - 1).max())
    if not differs.any() or not np.isfinite(error) or error > ROUNDING:
        return False
    if np.unique(other[differs]).size >= MANY:
        return True
    roots = np.sqrt(squared)
    is_chosen = np.allclose(roots, roots.round(_DIGITS), atol=1e-7) and np.allclose(
        other, other.round(_DIGITS), atol=1e-7
    )
    return error < EXACT and not is_chosen


def _scales_output(reading: TapeReading, deviation: Numbers) -> bool:
    """Return whether something that is learnt is multiplied or divided by the same numbers as the noise."""
    for op in reading.forward_ops:
        pair = reading.pair(op)
        if op.kind.removesuffix("_") not in ("mul", "div") or pair is None or op.in_model:
            continue
        for one, other in (pair, pair[::-1]):
            about = reading.tape.values[one]
            by = _by_sample(reading, other, about.shape) if one in reading.learnt else None
            if by is not None and by.shape == deviation.shape and np.allclose(np.abs(by), deviation, atol=1e-6):
                return True
    return False


def _is_linear(reading: TapeReading, data: _Part) -> bool:
    """Return whether the factor of the data is a line in a time that is drawn, as 1 - t: a path that is chosen so."""
    kinds = {op.kind.removesuffix("_") for op in reading.makers(data.factors)}
    return not kinds.isdisjoint(_UNIFORM) and kinds <= _LINEAR


def _mixtures(reading: TapeReading, op: Op) -> Iterator[tuple[_Part, _Part]]:
    """Yield what an operation adds up, if it is data and normal noise, each times numbers."""
    first = op.input("self")
    kind = op.kind.removesuffix("_")
    if first is None or not op.outs or len(reading.tape.values[op.outs[0]].shape) < 2:
        return
    one = _parts(reading, first)
    if kind in ("add", "sub") and (second := op.input("other")) is not None:
        other = _scaled(_parts(reading, second), op.args.get("alpha", 1))
    elif kind == "addcmul":
        other = _scaled(_product(reading, [op.args["tensor1"]["v"], op.args["tensor2"]["v"]]), op.args.get("value", 1))
    else:
        return
    for left, right in ((one, other), (other, one)):
        noises = [part for part in right if _is_normal(reading, part.value)]
        for noise in noises[:1]:
            yield from ((part, noise) for part in left if not _is_normal(reading, part.value))


def _scaled(parts: list[_Part], by: object) -> list[_Part]:
    factor = number(by)
    return [_Part(each.value, each.by * factor, each.factors) for each in parts] if _is_number(factor) else []


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _parts(reading: TapeReading, value: int, depth: int = 0) -> list[_Part]:
    """Return a value as a multiple of others, in every way: times 1, and by each factor that is one for a sample."""
    whole = _Part(reading.plain(value).id, np.ones(1))
    op = reading.tape.producer(whole.value)
    first = None if op is None else op.input("self")
    if op is None or first is None or depth > _MOST:
        return [whole]
    kind, second = op.kind.removesuffix("_"), op.input("other")
    by = number(op.args.get("other")) if second is None else None
    if kind == "neg":
        return [whole, *_scaled(_parts(reading, first, depth + 1), -1)]
    if kind in ("mul", "div") and _is_number(by) and by:
        return [whole, *_scaled(_parts(reading, first, depth + 1), by if kind == "mul" else 1 / by)]
    if kind == "mul" and second is not None:
        return [whole, *_product(reading, [first, second], depth + 1)]
    divisor = (
        _by_sample(reading, second, reading.tape.values[first].shape) if kind == "div" and second is not None else None
    )
    if divisor is None or second is None:
        return [whole]
    inside = _parts(reading, first, depth + 1)
    return [whole, *(_Part(each.value, each.by / divisor, (*each.factors, second)) for each in inside)]


def _product(reading: TapeReading, pair: list[int], depth: int = 0) -> list[_Part]:
    """Return a product of two tensors as one of them times the numbers of the other."""
    found = []
    for one, other in (pair, pair[::-1]):
        by = _by_sample(reading, other, reading.tape.values[one].shape)
        if by is not None and not _is_normal(reading, reading.plain(other).id):
            inside = _parts(reading, one, depth + 1)
            found += [_Part(each.value, each.by * by, (*each.factors, other)) for each in inside]
    return found


def _by_sample(reading: TapeReading, value: int, shape: tuple[int, ...]) -> Numbers | None:
    """Return the numbers that a tensor of this shape is multiplied by: one for each row, or one for all."""
    content = reading.numbers.of(value)
    if content is None or content.dtype.kind != "f" or not content.size or not shape or content.ndim > len(shape):
        return None
    content = np.asarray(content, dtype=np.float64)
    if content.size == 1:
        return content.reshape(1)
    if content.ndim < len(shape) or content.shape[0] != shape[0]:
        return None
    rows = content.reshape(len(content), -1)
    return rows[:, 0] if (rows == rows[:, :1]).all() else None


def _is_normal(reading: TapeReading, value: int) -> bool:
    """Return whether a value was drawn from the standard normal distribution."""
    op = reading.tape.producer(value)
    if op is None or not op.is_random or op.kind.removesuffix("_") not in _NORMAL:
        return False
    is_given = op.input("mean") is not None or op.input("std") is not None
    return not is_given and number(op.args.get("mean", 0)) == 0 and number(op.args.get("std", 1)) == 1
