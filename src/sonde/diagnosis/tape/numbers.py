"""The numbers of a taped step, computed again with numpy: data on its way to the loss, and the loss of given outputs.

A tape holds what the step began with. What was done to it since (an index, a shift, a comparison) is repeated here, so
that rules can compare contents, not only names and shapes. Layers are not repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.core.tape import Op, Tape, number, references

Numbers = NDArray[Any]
MAX_ELEMENTS: Final = 1 << 22
"""Larger results are not computed: rules run while a program trains."""
MAX_DEPTH: Final = 120
"""Operations in a row: each takes six calls inside each other, and Python allows a thousand."""
MAX_PRODUCTS: Final = 1 << 26
"""Multiplications of a product of matrices: some tens of milliseconds."""


class TapedNumbers:
    """Computes values of a tape, each once.

    Args:
        tape: The tape.
        instead: Numbers to take for some values, by id, in place of those on the tape; what was computed of them is
            computed again.

    """

    def __init__(self, tape: Tape, instead: Mapping[int, Numbers] | None = None) -> None:
        self.tape = tape
        self._known: dict[int, Numbers | None] = dict(instead or {})
        self._changed = tape.descendants(self._known) if instead else set()

    def of(self, value: int, depth: int = 0) -> Numbers | None:
        """Return the content of a value; None where it was not saved and cannot be computed."""
        if value not in self._known:
            self._known[value] = None  # a value that depends on itself would be no tape
            self._known[value] = self._find(value, depth)
        return self._known[value]

    def _find(self, value: int, depth: int) -> Numbers | None:
        about = self.tape.values[value]
        saved = self.tape.tensor(value) if about.saved and value not in self._changed else None
        if saved is not None or about.is_given or depth > MAX_DEPTH or about.size > MAX_ELEMENTS:
            return saved if saved is not None else self._alias(value, depth)
        op = self.tape.ops[about.made_by]
        compute = _COMPUTE.get(_plain(op.kind))
        if compute is None or value not in op.outs:
            return None
        try:
            with np.errstate(all="ignore"):
                made = compute(_Arguments(self, op, depth), op)
        except (_Unknown, ValueError, IndexError, TypeError, KeyError, AttributeError):
            return None
        found = made[op.outs.index(value)] if isinstance(made, list) else made
        return _as(np.asarray(found), about.dtype) if np.shape(found) == about.shape else None

    def _alias(self, value: int, depth: int) -> Numbers | None:
        before = self.tape.values[value].same_as
        return self.of(before, depth + 1) if before >= 0 and self.tape.values[value].is_given else None


class _Unknown(Exception):
    """A number that is needed is not known."""


class _Arguments:
    """The arguments of an operation as numbers."""

    def __init__(self, numbers: TapedNumbers, op: Op, depth: int) -> None:
        self._numbers = numbers
        self._op = op
        self._depth = depth
        self.shape = numbers.tape.values[op.outs[0]].shape
        self.is_learnt = numbers.tape.values[op.outs[0]].requires_grad

    def __call__(self, name: str, default: Any = None) -> Any:
        """Return a tensor as an array, and anything else as it is."""
        given = self._op.args.get(name, default)
        found = references(given)
        if not found or not isinstance(given, dict):
            return number(given)
        return self.array(found[0])

    def array(self, value: int) -> Numbers:
        """Return the content of a value."""
        found = self._numbers.of(value, self._depth + 1)
        if found is None:
            raise _Unknown
        return found

    def all(self, name: str) -> list[Numbers]:
        """Return the contents of a list of tensors."""
        return [self.array(each) for each in references(self._op.args[name])]


_TYPES: Final = {"bool": np.bool_, "bfloat16": np.float32, "float16": np.float32}


def _as(found: Numbers, dtype: str) -> Numbers:
    kind = _TYPES.get(dtype) or getattr(np, dtype, None)
    return found if kind is None else found.astype(kind, copy=False)


def _plain(kind: str) -> str:
    return kind.removesuffix("_") if not kind.startswith("_") else kind


# --------------------------------------------------------------------------------
# What operations do.


def _slice(get: _Arguments, op: Op) -> Numbers:
    taken = [slice(None)] * np.ndim(get("self"))
    end = op.args.get("end")
    taken[int(op.args.get("dim", 0))] = slice(op.args.get("start") or 0, end, op.args.get("step", 1))
    return get("self")[tuple(taken)]  # type: ignore[no-any-return]


def _index(get: _Arguments, op: Op) -> Numbers:
    places = [slice(None) if each is None else get.array(references(each)[0]) for each in op.args["indices"]]
    return get("self")[tuple(places)]  # type: ignore[no-any-return]


def _pieces(get: _Arguments, op: Op) -> list[Numbers]:
    dim = int(op.args.get("dim", 0))
    if op.kind == "unbind":
        return list(np.moveaxis(get("self"), dim, 0))
    sizes: Any = op.args.get("split_sizes") or op.args.get("split_size")
    ends = np.cumsum(sizes)[:-1] if isinstance(sizes, list) else range(sizes, np.shape(get("self"))[dim], sizes)
    return list(np.split(get("self"), ends, dim))


def _squeeze(get: _Arguments, op: Op) -> Numbers:
    return np.reshape(get("self"), get.shape)


def _arange(get: _Arguments, op: Op) -> Numbers:
    return np.arange(op.args.get("start", 0), op.args["end"], op.args.get("step", 1))


def _axes(op: Op) -> Any:
    dim = op.args.get("dim")
    return None if dim is None or dim == [] else tuple(dim) if isinstance(dim, list) else dim


def _reduced(how: Callable[..., Any]) -> Callable[[_Arguments, Op], Any]:
    return lambda get, op: how(get("self"), axis=_axes(op), keepdims=bool(op.args.get("keepdim")))


def _two(how: Callable[..., Any]) -> Callable[[_Arguments, Op], Any]:
    return lambda get, op: how(get("self"), get("other"))


def _one(how: Callable[..., Any]) -> Callable[[_Arguments, Op], Any]:
    return lambda get, op: how(get("self"))


def _log_softmax(get: _Arguments, op: Op) -> Numbers:
    scores = np.asarray(get("self"), dtype=np.float64)
    scores = scores - scores.max(axis=op.args["dim"], keepdims=True)
    return scores - np.log(np.exp(scores).sum(axis=op.args["dim"], keepdims=True))  # type: ignore[no-any-return]


def _sigmoid(value: Numbers) -> Numbers:
    return 0.5 * (1 + np.tanh(0.5 * np.asarray(value, dtype=np.float64)))


def _reduce_loss(each: Numbers, op: Op) -> Numbers:
    how = op.args.get("reduction", 1)
    return each if how == 0 else np.asarray(each.mean() if how == 1 else each.sum())


def _product(get: _Arguments, op: Op) -> Numbers:
    names = ("mat1", "mat2") if op.kind == "addmm" else ("self", "mat2")
    if get.is_learnt:
        raise _Unknown  # layers that are trained are not repeated
    one, two = (np.asarray(get(name)) for name in names)
    if one.size * two.shape[-1] > MAX_PRODUCTS:
        raise _Unknown
    found = np.matmul(one, two)
    return found + get("self") if op.kind == "addmm" else found  # type: ignore[no-any-return]


def _one_hot(get: _Arguments, op: Op) -> Numbers:
    found = np.array(get("self"))
    np.put_along_axis(found, get("index"), get("src") if "src" in op.args else get("value"), int(op.args["dim"]))
    return found


def _log_sum_exp(get: _Arguments, op: Op) -> Numbers:
    scores = np.asarray(get("self"), dtype=np.float64)
    total: Numbers = np.logaddexp.reduce(scores, axis=_axis(op), keepdims=True)
    return total if op.args.get("keepdim") else np.squeeze(total, axis=_axis(op))


def _norm(get: _Arguments, op: Op) -> Numbers:
    power = number(op.args.get("ord", op.args.get("p", 2)))
    if not isinstance(power, int | float) or not 0 < power < np.inf:
        raise _Unknown
    total = np.sum(np.abs(get("self")) ** power, axis=_axes(op), keepdims=bool(op.args.get("keepdim")))
    return np.asarray(total ** (1 / power))


def _axis(op: Op) -> int:
    dim = op.args.get("dim", -1)
    return int(dim[0] if isinstance(dim, list) else dim)


def _largest(get: _Arguments, op: Op) -> list[Numbers]:
    how, which = (np.max, np.argmax) if op.kind == "max" else (np.min, np.argmin)
    if "dim" not in op.args:
        return [np.asarray(how(get("self")))]
    keep = bool(op.args.get("keepdim"))
    return [made(get("self"), axis=_axis(op), keepdims=keep) for made in (how, which)]


def _likelihood(get: _Arguments, op: Op) -> list[Numbers]:
    scores, target = np.asarray(get("self")), np.asarray(get("target"))
    valid = target != op.args.get("ignore_index", -100)
    picked = np.take_along_axis(scores, np.expand_dims(np.where(valid, target, 0), 1), 1).squeeze(1)
    weight = np.ones(scores.shape[1]) if "weight" not in op.args else get("weight")
    weights = np.where(valid, weight[np.where(valid, target, 0)], 0.0)
    each, total = -picked * weights, weights.sum()
    how = op.args.get("reduction", 1)
    loss = each if how == 0 else each.sum() / total if how == 1 else each.sum()
    return [np.asarray(loss), np.asarray(total)]


def _binary(get: _Arguments, op: Op) -> Numbers:
    given, target = np.asarray(get("self"), dtype=np.float64), get("target")
    if op.kind == "binary_cross_entropy_with_logits":
        weight = 1.0 if "pos_weight" not in op.args else get("pos_weight")
        each = (1 - target) * given + (1 + (weight - 1) * target) * np.logaddexp(0, -given)
    else:
        with np.errstate(divide="ignore"):
            each = -(target * np.maximum(np.log(given), -100) + (1 - target) * np.maximum(np.log1p(-given), -100))
    return _reduce_loss(each if "weight" not in op.args else each * get("weight"), op)


def _squared(get: _Arguments, op: Op) -> Numbers:
    return _reduce_loss(np.square(np.asarray(get("self"), dtype=np.float64) - get("target")), op)


def _smooth(get: _Arguments, op: Op) -> Numbers:
    far = np.abs(np.asarray(get("self"), dtype=np.float64) - get("target"))
    beta = op.args.get("beta", op.args.get("delta", 1.0))
    scale = 1.0 if op.kind == "huber_loss" else 1 / beta
    return _reduce_loss(np.where(far < beta, 0.5 * far**2, beta * (far - 0.5 * beta)) * scale, op)


def _add(get: _Arguments, op: Op) -> Numbers:
    return get("self") + op.args.get("alpha", 1) * get("other")  # type: ignore[no-any-return]


def _sub(get: _Arguments, op: Op) -> Numbers:
    return get("self") - op.args.get("alpha", 1) * get("other")  # type: ignore[no-any-return]


def _div(get: _Arguments, op: Op) -> Numbers:
    found = get("self") / get("other")
    rounding = op.args.get("rounding_mode")
    return np.floor(found) if rounding == "floor" else np.trunc(found) if rounding else found  # type: ignore[no-any-return]


def _clamp(get: _Arguments, op: Op) -> Numbers:
    return np.asarray(np.clip(get("self"), get("min"), get("max")))


def _spread(compute: Callable[..., Any]) -> Callable[[_Arguments, Op], Any]:
    """Return a deviation or a variance, which torch divides by one less than the count by default."""

    def made(get: _Arguments, op: Op) -> Any:
        correction = op.args.get("correction", int(op.args.get("unbiased", True)))
        less = 1 if correction is None else correction
        return compute(get("self"), axis=_axes(op), ddof=less, keepdims=bool(op.args.get("keepdim")))

    return made


def _put(get: _Arguments, op: Op) -> Numbers:
    places = [slice(None) if each is None else get.array(references(each)[0]) for each in op.args["indices"]]
    if op.args.get("accumulate"):
        raise _Unknown
    found = np.array(get("self"))
    found[tuple(places)] = get("values")
    return found


_LOSS_OPS: Final[dict[str, Callable[[_Arguments, Op], Any]]] = {
    "_log_softmax": _log_softmax,
    "_softmax": lambda get, op: np.exp(_log_softmax(get, op)),
    "nll_loss_forward": _likelihood,
    "nll_loss2d_forward": _likelihood,
    "binary_cross_entropy": _binary,
    "binary_cross_entropy_with_logits": _binary,
    "mse_loss": _squared,
    "smooth_l1_loss": _smooth,
    "huber_loss": _smooth,
    "sigmoid": _one(_sigmoid),
    "log_sigmoid_forward": lambda get, op: [-np.logaddexp(0, -get("self")), np.zeros(0)],
    "softplus": _one(lambda value: np.logaddexp(0, value)),
}
_RESHAPES: Final = ("view", "_unsafe_view", "reshape", "_reshape_alias", "squeeze", "unsqueeze", "flatten", "unflatten")
_COPIES: Final = ("clone", "_to_copy", "detach", "alias", "lift_fresh", "contiguous")
_COMPUTE: Final[dict[str, Callable[[_Arguments, Op], Any]]] = {
    **_LOSS_OPS,
    **dict.fromkeys(_RESHAPES, _squeeze),
    **dict.fromkeys(_COPIES, _one(lambda value: value)),
    **dict.fromkeys(("unbind", "split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes"), _pieces),
    "permute": lambda get, op: np.transpose(get("self"), op.args["dims"]),
    "transpose": lambda get, op: np.swapaxes(get("self"), op.args["dim0"], op.args["dim1"]),
    "t": _one(np.transpose),
    "expand": lambda get, op: np.broadcast_to(get("self"), get.shape),
    "slice": _slice,
    "select": lambda get, op: np.take(get("self"), op.args["index"], axis=op.args.get("dim", 0)),
    "index": _index,
    "index_select": lambda get, op: np.take(get("self"), get("index"), axis=op.args["dim"]),
    "gather": lambda get, op: np.take_along_axis(get("self"), get("index"), op.args["dim"]),
    "flip": lambda get, op: np.flip(get("self"), op.args["dims"]),
    "cat": lambda get, op: np.concatenate(get.all("tensors"), op.args.get("dim", 0)),
    "stack": lambda get, op: np.stack(get.all("tensors"), op.args.get("dim", 0)),
    "arange": _arange,
    "nonzero": _one(np.argwhere),
    "linspace": lambda get, op: np.linspace(get("start"), get("end"), op.args["steps"]),
    "scalar_tensor": lambda get, op: np.asarray(get("s")),
    "roll": lambda get, op: np.roll(get("self"), op.args["shifts"], op.args.get("dims") or None),
    "zeros": lambda get, op: np.zeros(get.shape),
    "zeros_like": lambda get, op: np.zeros(get.shape),
    "ones": lambda get, op: np.ones(get.shape),
    "ones_like": lambda get, op: np.ones(get.shape),
    "full": lambda get, op: np.full(get.shape, number(op.args["fill_value"])),
    "full_like": lambda get, op: np.full(get.shape, number(op.args["fill_value"])),
    "new_zeros": lambda get, op: np.zeros(get.shape),
    "new_ones": lambda get, op: np.ones(get.shape),
    "new_full": lambda get, op: np.full(get.shape, number(op.args["fill_value"])),
    "fill": lambda get, op: np.full(get.shape, get("value")),
    "zero": lambda get, op: np.zeros(get.shape),
    "copy": lambda get, op: np.broadcast_to(get("src"), get.shape),
    "tril": lambda get, op: np.tril(get("self"), op.args.get("diagonal", 0)),
    "triu": lambda get, op: np.triu(get("self"), op.args.get("diagonal", 0)),
    "add": _add,
    "sub": _sub,
    "rsub": lambda get, op: get("other") - op.args.get("alpha", 1) * get("self"),
    "mul": _two(np.multiply),
    "div": _div,
    "pow": lambda get, op: np.power(get("self"), get("exponent")),
    "neg": _one(np.negative),
    "abs": _one(np.abs),
    "exp": _one(np.exp),
    "log": _one(np.log),
    "sqrt": _one(np.sqrt),
    "rsqrt": _one(lambda value: 1 / np.sqrt(value)),
    "tanh": _one(np.tanh),
    "relu": _one(lambda value: np.maximum(value, 0)),
    "leaky_relu": lambda get, op: np.where((x := get("self")) > 0, x, op.args.get("negative_slope", 0.01) * x),
    "silu": _one(lambda value: value * _sigmoid(value)),
    "log1p": _one(np.log1p),
    "expm1": _one(np.expm1),
    "floor": _one(np.floor),
    "ceil": _one(np.ceil),
    "round": _one(np.round),
    "trunc": _one(np.trunc),
    "xlogy": lambda get, op: np.where((x := get("self")) == 0, 0.0, x * np.log(get("other"))),
    "reciprocal": _one(lambda value: 1 / value),
    "clamp": _clamp,
    "clamp_min": lambda get, op: np.maximum(get("self"), get("min")),
    "clamp_max": lambda get, op: np.minimum(get("self"), get("max")),
    "minimum": _two(np.minimum),
    "maximum": _two(np.maximum),
    "eq": _two(np.equal),
    "ne": _two(np.not_equal),
    "lt": _two(np.less),
    "le": _two(np.less_equal),
    "gt": _two(np.greater),
    "ge": _two(np.greater_equal),
    "remainder": _two(np.remainder),
    "logical_not": _one(np.logical_not),
    "bitwise_not": _one(lambda value: ~value),
    "bitwise_and": _two(np.bitwise_and),
    "bitwise_or": _two(np.bitwise_or),
    "logical_and": _two(np.logical_and),
    "logical_or": _two(np.logical_or),
    "where": lambda get, op: np.where(get("condition"), get("self"), get("other")),
    "masked_fill": lambda get, op: np.where(get("mask"), get("value"), get("self")),
    "sum": _reduced(np.sum),
    "mean": _reduced(np.mean),
    "prod": _reduced(np.prod),
    "any": _reduced(np.any),
    "all": _reduced(np.all),
    "amax": _reduced(np.max),
    "amin": _reduced(np.min),
    "linalg_vector_norm": _norm,
    "norm": _norm,
    "index_put": _put,
    "mm": _product,
    "addmm": _product,
    "bmm": _product,
    "scatter": _one_hot,
    "logsumexp": _log_sum_exp,
    "max": _largest,
    "min": _largest,
    "argmax": lambda get, op: np.argmax(get("self"), axis=op.args.get("dim"), keepdims=bool(op.args.get("keepdim"))),
    "cumsum": lambda get, op: np.cumsum(get("self"), axis=op.args["dim"]),
    "cumprod": lambda get, op: np.cumprod(get("self"), axis=op.args["dim"]),
    "repeat": lambda get, op: np.tile(get("self"), op.args["repeats"]),
    "repeat_interleave": lambda get, op: np.repeat(np.arange(len(get("repeats"))), get("repeats")),
    "var": _spread(np.var),
    "std": _spread(np.std),
    "sign": _one(np.sign),
    "cos": _one(np.cos),
    "sin": _one(np.sin),
}
