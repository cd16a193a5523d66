"""What a taped step shows of targets of reinforcement learning: values of the next state, and ends of episodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from sonde.core import signals
from sonde.core.tape import Op, Value, number
from sonde.diagnosis.rule import Found, Threshold, below, fact, on_tape
from sonde.diagnosis.tape.reading import CARRIERS, RESHAPING, TapeReading
from sonde.diagnosis.tape.targets import MIN_SAMPLES

_BEST: Final = frozenset(
    {"max", "amax", "gather", "mean", "sum", "min", "minimum", *CARRIERS, "mul", "sub", "add", "detach"}
)


@on_tape
def unmasked_bootstrap(reading: TapeReading) -> Found | None:
    """Find a target that adds the value of the next state, while flags of the batch are unused, or only added."""
    for _, target, op in reading.compared():
        # A target network that no optimizer holds may stay attached: its gradients do no harm.
        if target in reading.learnt or not reading.is_bootstrap(target):
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
    """Return whether numbers of the data, or what the loop has made of them, are 0 and 1 and unused."""
    maker = reading.tape.producer(value.id)
    is_made = maker is not None and not maker.in_model and maker.phase in ("forward", "between")
    is_used = any(op.kind != "lift_fresh" for op in reading.tape.consumers(value.id))
    if is_used or value.id in reading.of_weights or value.id in reading.fetched_ahead:
        return False
    content = reading.numbers.of(value.id) if is_made or value.role in ("constant", "batch") else None
    if content is None:
        return is_made and reading.plain(value.id).dtype == "bool"
    return set(np.unique(content)) <= {0, 1}
