"""What a taped step computes twice: values that are equal because the same operations made them of the same values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from sonde.core import signals
from sonde.core.tape import OPAQUE, Call, Op, references
from sonde.diagnosis.rule import Found, fact, on_tape
from sonde.diagnosis.tape.numbers import Numbers
from sonde.diagnosis.tape.reading import RESHAPING, TapeReading

_AS_IS: Final = RESHAPING - {"detach"}
_TURNS: Final = frozenset({"t", "transpose", "permute", "mT", *_AS_IS})
_BY_ELEMENT: Final = frozenset({"sub", "mul", "mse_loss", "smooth_l1_loss", "huber_loss"})
_PRODUCTS: Final = frozenset({"mm", "bmm", "_cdist_forward"})
_JOINS: Final = frozenset({"cat", "stack"})
MAX_CALLS: Final = 16
"""More calls of one model in a step are the steps of a loop, not the two sides of a pair."""


MAX_DEPTH: Final = 100
"""Operations that are followed at once: deeper values are compared from the bottom up."""


class _Equality:
    """Whether two values are bitwise equal for any weights, as far as the tape shows."""

    def __init__(self, reading: TapeReading) -> None:
        self._reading = reading
        self._known: dict[tuple[int, int], bool] = {}

    def __call__(self, one: int, other: int, depth: int = 0) -> bool:
        """Return whether the same operations made two values of the same values, without a random one."""
        abouts = [self._reading.tape.values[each] for each in (one, other)]
        if (abouts[0].shape, abouts[0].dtype) != (abouts[1].shape, abouts[1].dtype):
            return False
        one, other = sorted(self._reading.plain(each, _AS_IS).id for each in (one, other))
        if one == other:
            return True
        pair = (one, other)
        if pair not in self._known:
            self._known[pair] = False
            self._known[pair] = depth < MAX_DEPTH and self._find(one, other, depth + 1)
        return self._known[pair]

    def _find(self, one: int, other: int, depth: int) -> bool:
        tape = self._reading.tape
        first, second = tape.producer(one), tape.producer(other)
        if first is None or second is None:
            contents = self._content(one), self._content(other)
            return contents[0] is not None and contents[1] is not None and np.array_equal(contents[0], contents[1])
        if first.name != second.name or first.is_random or second.is_random or first.name == OPAQUE:
            return False
        if _place(first, one) != _place(second, other) or _place(first, one) < 0:
            return False
        names = set(first.args) | set(second.args)
        return all(
            self._are_same(first.args.get(name), second.args.get(name), depth)
            for name in names
            if not (name.startswith("running_") and _uses_own_statistics(first))
        )

    def _content(self, value: int) -> Numbers | None:
        """Return the numbers of data that no operation made."""
        about = self._reading.tape.values[value]
        is_data = about.is_given and about.role not in ("parameter", "buffer")
        return self._reading.tape.tensor(value) if is_data and about.saved else None

    def _are_same(self, one: Any, other: Any, depth: int) -> bool:
        if isinstance(one, list) and isinstance(other, list):
            pairs = zip(one, other, strict=False)
            return len(one) == len(other) and all(self._are_same(*pair, depth) for pair in pairs)
        values = references(one), references(other)
        if values[0] and values[1]:
            return self(values[0][0], values[1][0], depth)
        return bool(one == other)


def _uses_own_statistics(op: Op) -> bool:
    """Return whether a batch norm normalises by the statistics of its input, and only updates the running ones."""
    return "batch_norm" in op.name and "no_update" not in op.name and bool(op.args.get("training", True))


def _place(op: Op, value: int) -> int:
    made = (*op.outs, *op.writes)
    return made.index(value) if value in made else -1


@on_tape
def same_input_twice(reading: TapeReading) -> Found | None:
    """Find two calls of a model with the same input whose equal results a loss compares as two sides of a pair."""
    by_model: dict[str, list[Call]] = {}
    for call in reading.tape.calls:
        is_outermost = call.depth == 0 and not call.path.startswith("<")
        if is_outermost and any(reading.tape.values[out].requires_grad for out in call.outs.values()):
            by_model.setdefault(call.path, []).append(call)
    equal = _Equality(reading)
    for calls in by_model.values():
        for one, other in itertools.combinations(calls, 2) if len(calls) <= MAX_CALLS else ():
            if one.last > other.first or not _are_repeated(reading, one, other, equal):
                continue
            op = _meeting(reading, one, other, equal)
            if op is not None:
                count = reading.tape.values[next(iter(other.outs.values()))].shape[:1]
                return Found(
                    sites=tuple(dict.fromkeys((signals.LOSS, "(data)", one.path))),
                    evidence=(
                        fact("calls with the same input", 2),
                        fact("samples that are compared with themselves", count[0] if count else 1),
                    ),
                    cause=f"{one.kind} is called twice with the same input{_line(reading, other)}, and "
                    "nothing in it is random, so both results are equal. They are compared as a pair"
                    f"{reading.where(op)}: each pair is a sample and itself, and there is nothing to learn from it.",
                    fix="Give the second call the other view of the samples, such as another augmentation.",
                    refute="Compare the inputs of both calls with torch.equal: if it returns False, this finding is "
                    "wrong.",
                )
    return None


def _line(reading: TapeReading, call: Call) -> str:
    line = reading.tape.lines[call.line] if call.line >= 0 else None
    return "" if line is None else f" ({line}: `{line.text}`)" if line.text else f" ({line})"


def _are_repeated(reading: TapeReading, one: Call, other: Call, equal: _Equality) -> bool:
    if not one.args or set(one.args) != set(other.args) or set(one.outs) != set(other.outs):
        return False
    if not all(equal(value, other.args[place]) for place, value in one.args.items()):
        return False
    ops = (reading.tape.ops[call.first : call.last] for call in (one, other))
    for first, second in zip(*ops, strict=False):  # from the bottom up, so that no chain gets long
        for pair in zip(first.outs, second.outs, strict=False):
            equal(*pair)
    return all(value != other.outs[place] and equal(value, other.outs[place]) for place, value in one.outs.items())


def _meeting(reading: TapeReading, one: Call, other: Call, equal: _Equality) -> Op | None:
    """Return the operation that compares what two calls returned: both in the same way, or each with the other."""
    of_one, of_other = (reading.tape.descendants(call.outs.values()) for call in (one, other))
    of_one, of_other = of_one - of_other, of_other - of_one
    crossed: list[tuple[int, int]] = []
    for op in reading.forward_ops:
        for first, second in _compared(reading, op):
            if first in of_other and second in of_one:
                first, second = second, first
            if first not in of_one or second not in of_other or reading.tape.values[first].size < 2:
                continue
            pair = (reading.plain(first, _TURNS).id, reading.plain(second, _TURNS).id)
            crossed.append(pair)
            if any(equal(pair[0], each[1]) and equal(pair[1], each[0]) for each in crossed):
                return op
    return None


def _compared(reading: TapeReading, op: Op) -> Iterator[tuple[int, int]]:
    """Yield what an operation compares, row with row, or all rows with each other where a row's own is the answer."""
    kind = op.kind.removesuffix("_")
    names = [op.input(name) for name in ("self", "other", "target", "mat2", "x1", "x2")]
    given = [each for each in names if each is not None]
    if kind in _JOINS:
        parts = references(op.args.get("tensors"))
        if len(parts) == 2 and _meets_itself(reading, op.outs[0]):
            yield parts[0], parts[1]
    elif len(given) == 2 and kind in _BY_ELEMENT | _PRODUCTS:
        shapes = {reading.tape.values[each].shape for each in given}
        is_by_row = kind in _BY_ELEMENT and len(shapes) == 1
        if is_by_row or _wants_diagonal(reading, op.outs[0]):
            yield given[0], given[1]


def _meets_itself(reading: TapeReading, value: int) -> bool:
    """Return whether rows that were joined are compared with each other."""
    after = reading.tape.descendants(value)
    return any(op.kind in _PRODUCTS and all(each in after for _, each in op.inputs()) for op in reading.forward_ops)


def _wants_diagonal(reading: TapeReading, value: int) -> bool:
    """Return whether the right answer of each row is the column of the same number."""
    after = reading.tape.descendants(value)
    if any(op.kind in ("diagonal", "trace") and op.input("self") in after for op in reading.forward_ops):
        return True
    for loss in reading.losses:
        target = reading.numbers.of(loss.target) if loss.target is not None and loss.value in after else None
        if target is not None and target.ndim == 1 and np.array_equal(target, np.arange(len(target))):
            return True
    return False
