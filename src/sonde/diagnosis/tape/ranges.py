"""Between which numbers a value of a taped step lies, whatever the weights are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from sonde.core.tape import Op, number
from sonde.diagnosis.tape.reading import CARRIERS, TapeReading

Reach = tuple[float, float]
ANYTHING: Final[Reach] = (-math.inf, math.inf)
NEVER_NEGATIVE: Final[Reach] = (0.0, math.inf)
NEVER_POSITIVE: Final[Reach] = (-math.inf, 0.0)
BOUNDED: Final[dict[str, Reach]] = {
    **dict.fromkeys(("sigmoid", "hardsigmoid", "_softmax", "_safe_softmax"), (0.0, 1.0)),
    **dict.fromkeys(("tanh", "hardtanh", "cos", "sin", "sign", "erf"), (-1.0, 1.0)),
    **dict.fromkeys(("relu", "threshold", "abs", "exp", "softplus", "sqrt", "linalg_vector_norm"), NEVER_NEGATIVE),
    "elu": (-1.0, math.inf),
    "gelu": (-0.17, math.inf),
    "silu": (-0.28, math.inf),
    **dict.fromkeys(("_log_softmax", "log_sigmoid_forward"), (-math.inf, 0.0)),
}
LOSSES: Final = frozenset(
    {"mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"}
    | {"nll_loss_forward", "nll_loss2d_forward", "_ctc_loss"}
)
"""Operations that compare outputs with targets and are 0 at best."""
_KEEPS_RANGE: Final = CARRIERS | {"mean", "amax", "amin", "gather", "max", "min", "detach", "diagonal", "masked_select"}
_CHOOSING: Final = frozenset({"where", "stack", "cat", "maximum", "minimum"})
"""Operations each of whose results is one of the numbers that they are given."""
_RISING: Final[dict[str, Callable[[float], float]]] = {
    "exp": lambda end: math.exp(min(end, 700.0)) if end < math.inf else end,
    "softplus": lambda end: max(end, 0.0) + math.log1p(math.exp(-abs(end))),
    "sqrt": lambda end: math.sqrt(max(end, 0.0)),
    **dict.fromkeys(("relu", "threshold"), lambda end: max(end, 0.0)),
}
"""Functions that never fall: both ends of a range are known from those of the argument."""


def reach(reading: TapeReading, value: int, depth: int = 24) -> Reach:
    """Return between which numbers a value lies, whatever the weights are."""
    known: dict[int, Reach] = reading.once(__name__, lambda _: {})
    if value not in known:
        known[value] = ANYTHING  # while it is being found
        known[value] = _find(reading, value, depth)
    return known[value]


def _find(reading: TapeReading, value: int, depth: int) -> Reach:
    op = reading.tape.producer(value)
    if op is None or depth <= 0:
        return ANYTHING
    kind, first = plain_kind(op), op.input("self")
    if kind in LOSSES or op.function == "kl_div":
        return NEVER_NEGATIVE if value == op.outs[0] else ANYTHING
    if kind in ("mm", "bmm"):
        most = _cosines(reading, op)
        return ANYTHING if most is None else (-most, most)
    ends = ANYTHING if first is None else reach(reading, first, depth - 1)
    if kind in BOUNDED and kind != "hardtanh":
        rises = _RISING.get(kind)
        return BOUNDED[kind] if rises is None or ends == ANYTHING else (rises(ends[0]), rises(ends[1]))
    if kind in _CHOOSING:
        parts = [_ends_of(reading, each, depth) for name, each in op.inputs() if name not in ("condition", "mask")]
        return min(low for low, _ in parts), max(high for _, high in parts)
    if first is None:
        return ANYTHING
    is_alone = op.input("other") is None or is_square(op)
    return _changed(op, kind, ends) if is_alone else _combined(reading, op, depth)


def _ends_of(reading: TapeReading, value: int, depth: int) -> Reach:
    """Return the range of a value; of data and constants, that of this step."""
    content = None if reading.tape.values[value].requires_grad else reading.numbers.of(value)
    if content is None or not content.size or content.dtype.kind not in "fiub":
        return reach(reading, value, depth - 1)
    return float(content.min()), float(content.max())


def _changed(op: Op, kind: str, ends: Reach) -> Reach:
    """Return the range of what an operation makes of one tensor and of numbers."""
    low, high = ends
    if kind in ("clamp", "hardtanh", "clamp_min", "clamp_max"):
        least, most = (number(op.args.get(name)) for name in (("min_val", "max_val") if kind == "hardtanh" else _ENDS))
        return (max(low, least) if _is_number(least) else low, min(high, most) if _is_number(most) else high)
    if kind in _KEEPS_RANGE:
        return low, high
    if kind == "neg":
        return -high, -low
    if is_square(op):
        return 0.0, max(low * low, high * high)
    if kind == "sum":
        return (0.0 if low >= 0 else -math.inf), (0.0 if high <= 0 else math.inf)
    if kind in ("mul", "div", "add", "sub", "rsub"):
        return _moved(kind, ends, number(op.args.get("other", 1)), number(op.args.get("alpha", 1)))
    return ANYTHING


_ENDS: Final = ("min", "max")


def plain_kind(op: Op) -> str:
    """Return the kind of an operation, the same for one that writes to its argument."""
    return op.kind if op.kind.startswith("_") else op.kind.removesuffix("_")


def is_square(op: Op) -> bool:
    """Return whether an operation takes an even power of its argument."""
    power = number(op.args.get("exponent")) if op.kind == "pow" else None
    if op.kind == "mul":
        return op.input("self") is not None and op.input("self") == op.input("other")
    return isinstance(power, int | float) and power > 0 and power % 2 == 0


def _combined(reading: TapeReading, op: Op, depth: int) -> Reach:
    """Return the range of a sum of two tensors, or of one that is weighed by data between 0 and 1 or by a count."""
    pair, is_product = reading.pair(op), plain_kind(op) == "mul"
    if pair is None:
        return ANYTHING
    ends = [reach(reading, each, depth - 1) for each in pair]
    if plain_kind(op) == "add" and number(op.args.get("alpha", 1)) == 1:
        return ends[0][0] + ends[1][0], ends[0][1] + ends[1][1]
    if is_product and ends == [NEVER_NEGATIVE, NEVER_NEGATIVE]:
        return NEVER_NEGATIVE  # as of a loss and its learnt weight
    for (low, high), weight in zip(ends, pair[::-1], strict=True):
        content = None if reading.tape.values[weight].requires_grad else reading.numbers.of(weight)
        if content is None or not content.size or content.dtype.kind not in "fiub":
            continue
        if is_product and content.min() >= 0 and content.max() <= 1 and content.max() > 0:
            return min(low, 0.0), max(high, 0.0)
        if plain_kind(op) == "div" and weight == pair[1] and content.min() >= 1:
            return min(low, 0.0), max(high, 0.0)
    return ANYTHING


def _is_number(given: object) -> bool:
    return isinstance(given, int | float)


def _moved(kind: str, ends: Reach, by: object, alpha: object) -> Reach:
    """Return a range that was shifted or scaled by a number."""
    if not isinstance(by, int | float) or not isinstance(alpha, int | float) or (kind == "div" and by == 0):
        return ANYTHING
    shift = by * alpha
    changed = {
        "mul": lambda end: end * by if by else 0.0,
        "div": lambda end: end / by,
        "add": lambda end: end + shift,
        "sub": lambda end: end - shift,
        "rsub": lambda end: by - alpha * end,
    }[kind]
    low, high = sorted(map(changed, ends))
    return low, high


def _cosines(reading: TapeReading, op: Op) -> float | None:
    """Return the largest product of two rows of fixed length; None if a product of matrices is not of such."""
    lengths = [_length(reading, op.input(name)) for name in ("self", "mat2")]
    return None if None in lengths else math.prod(each for each in lengths if each is not None)


def _length(reading: TapeReading, value: int | None) -> float | None:
    """Return the length of rows that were divided by their own, and multiplied by numbers since."""
    op = None if value is None else reading.origin(value)
    other = None if op is None else op.input("other")
    if op is None or op.kind not in ("mul", "div"):
        return None
    if other is None:
        by, inner = number(op.args.get("other", 1)), _length(reading, op.input("self"))
        if inner is None or not isinstance(by, int | float) or by == 0:
            return None
        return abs(inner * by if op.kind == "mul" else inner / by)
    for _ in range(8 if op.kind == "div" else 0):
        length = None if other is None else reading.origin(other)
        if length is None or length.kind == "linalg_vector_norm":
            return None if length is None else 1.0
        other = length.input("self")
    return None


def bounded_by(reading: TapeReading, value: int) -> Op:
    """Return the operation by which a value is bounded."""
    op = reading.tape.producer(value)
    while op is not None and (op.kind in _KEEPS_RANGE or op.kind.rstrip("_") in ("mul", "div", "add", "sub", "neg")):
        first = op.input("self")
        before = None if first is None or reach(reading, first) == ANYTHING else reading.tape.producer(first)
        if before is None:
            break
        op = before
    assert op is not None  # something bounds it
    return op
