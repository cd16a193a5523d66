"""What a taped step shows of masks, random draws, and settings of modules."""

from __future__ import annotations

import difflib
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.core import signals
from sonde.core.tape import ModuleInfo, Op, number
from sonde.diagnosis.rule import Found, by_number, fact, few, on_tape
from sonde.diagnosis.tape.reading import SOFTMAXES, TapeReading

# --------------------------------------------------------------------------------
# Masks.


@on_tape
def inverted_mask(reading: TapeReading) -> Found | None:
    """Find a mask that lets padding through and shuts tokens out."""
    padding = padding_of(reading)
    if not padding:
        return None
    for op in reading.forward_ops:
        does = _shuts_out(reading, op, padding) or _drops_loss(reading, op, padding)
        if does:
            return Found(
                sites=(reading.site(op, signals.LOSS),),
                evidence=(fact("masks that are the wrong way round", 1),),
                cause=f"A mask is the wrong way round{reading.where(op)}: it {does}.",
            )
    return None


def _shuts_out(reading: TapeReading, op: Op, padding: list[Padding]) -> str:
    """Return what a mask does to attention scores if it shuts out tokens, not padding."""
    shut = _shut_places(reading, op)
    keys = [] if shut is None else [(_by_key(shut, pad.shape), pad) for pad in padding]
    if not any(found is not None and np.array_equal(found, ~pad) for found, pad in keys):
        return ""
    if "scaled_dot_product" not in op.kind and not _feeds_softmax(reading, op):
        return ""
    return "shuts out the scores of real tokens, and keeps those of padding"


def _shut_places(reading: TapeReading, op: Op) -> NDArray[Any] | None:
    """Return where scores are replaced by a very low number, or such a number is added to them."""
    kind = op.kind.removesuffix("_")
    if kind == "masked_fill" and _is_very_low(reading, op, "value"):
        return _content(reading, op.input("mask"), turned=False)
    if kind == "where" and (_is_very_low(reading, op, "other") or _is_very_low(reading, op, "self")):
        return _content(reading, op.input("condition"), turned=_is_very_low(reading, op, "other"))
    names = ("attn_mask", "attn_bias") if "scaled_dot_product" in kind else ("self", "other") if kind == "add" else ()
    for value in (op.input(name) for name in names):
        is_data = value is not None and value not in reading.learnt and reading.tape.values[value].size > 1
        added = reading.numbers.of(value) if is_data and value is not None else None
        if added is not None and added.dtype.kind == "f" and ((added == 0) | (added <= VERY_LOW)).all():
            return np.asarray(added <= VERY_LOW)
    return None


def _content(reading: TapeReading, value: int | None, *, turned: bool) -> NDArray[Any] | None:
    content = None if value is None else reading.numbers.of(value)
    if content is None or content.dtype != np.bool_:
        return None
    return ~content if turned else content


MOST_ADDED: Final = 4
"""Keys that a model puts beside those of its tokens."""


def _by_key(shut: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any] | None:
    """Return a mask of scores as one row of keys for each sample; its first head and query stand for the others.

    Keys that were put before or after the tokens, such as that of a class, are open in every row and left out.
    """
    rows, keys = shape
    if not shut.ndim or not keys <= shut.shape[-1] <= keys + MOST_ADDED or len(shut) % rows:
        return None
    found: NDArray[Any] = shut.reshape(rows, -1, shut.shape[-1])[:, 0]
    more = found.shape[-1] - keys
    if not found[:, :more].any():
        return found[:, more:]
    return None if found[:, keys:].any() else found[:, :keys]


def _is_very_low(reading: TapeReading, op: Op, name: str) -> bool:
    value, given = number(op.args.get(name)), op.input(name)
    if given is not None:
        maker = reading.tape.producer(given)
        value = number(maker.args.get("s", maker.args.get("fill_value"))) if maker is not None else None
    return isinstance(value, int | float) and value <= VERY_LOW


def _drops_loss(reading: TapeReading, op: Op, padding: list[Padding]) -> str:
    """Return what a factor does to a loss if it keeps that of padding."""
    factors = [value for _, value in op.inputs()]
    if op.kind not in ("mul", "mul_") or op.module or len(factors) < 2:
        return ""
    marked = [value for value in factors if _marks(reading, value, padding) == "padding"]
    others = [value for value in factors if value not in marked and reading.tape.values[value].requires_grad]
    return "keeps the loss of padding and drops that of real tokens" if marked and others else ""


VERY_LOW: Final = -1e4
"""Scores at or below this are masked: they vanish in a softmax."""


def _feeds_softmax(reading: TapeReading, op: Op) -> bool:
    after = reading.tape.descendants(list(op.outs), through=lambda each: each.kind not in SOFTMAXES)
    softmaxes = (use for value in after for use in reading.tape.consumers(value))
    return any(use.kind in SOFTMAXES or "scaled_dot_product" in use.kind for use in softmaxes)


Padding = NDArray[np.bool_]
"""Of tokens (samples, positions): where they are padding."""


def padding_of(reading: TapeReading) -> list[Padding]:
    """Return where tokens that a model reads are padding: a number at the end of rows, or at their beginning."""
    found = []
    for op in reading.tape.ops:
        value = op.input("indices") if op.kind == "embedding" else None
        tokens = None if value is None else reading.numbers.of(value)
        if tokens is None:
            continue
        candidates = {max(int(op.args.get("padding_idx", 0)), 0), 0}
        found += [tokens == each for each in candidates if _is_padding(tokens, each)]
    return found + [pad for value in reading.tape.inputs_of_root() if (pad := _silence(reading, value)) is not None]


def _silence(reading: TapeReading, value: int) -> Padding | None:
    """Return which steps of series of real numbers are padding: all zeros at the end, of different lengths."""
    about = reading.tape.values[value]
    content = reading.numbers.of(value) if len(about.shape) == 3 and about.dtype.startswith("float") else None
    if content is None or min(content.shape) < 2:
        return None
    empty = (content == 0).all(axis=2)
    lengths = content.shape[1] - np.flip(empty, 1).cumprod(axis=1).sum(axis=1)
    pad: Padding = np.arange(content.shape[1]) >= lengths[:, None]
    return pad if np.unique(lengths).size > 2 and np.array_equal(pad, empty) else None


def _marks(reading: TapeReading, value: int, padding: list[Padding]) -> str | None:
    """Return whether a mask is true for `padding` or for `tokens`; None if it is neither."""
    shape = tuple(size for size in reading.tape.values[value].shape if size > 1)
    if not any(each.shape == shape for each in padding):
        return None
    content = reading.numbers.of(value)
    if content is None or not np.isin(content, (0, 1)).all():
        return None
    mask = content.astype(bool).reshape(shape)
    if any(each.shape == shape and np.array_equal(mask, each) for each in padding):
        return "padding"
    return "tokens" if any(each.shape == shape and np.array_equal(mask, ~each) for each in padding) else None


def _is_padding(tokens: NDArray[np.generic], padding: int) -> bool:
    """Return whether a number occurs only at the end, or only at the beginning, of rows."""
    if tokens.ndim != 2 or tokens.dtype.kind not in "iu":
        return False
    is_pad = tokens == padding
    changes = np.abs(np.diff(is_pad.astype(np.int8), axis=1)).sum(axis=1)
    return bool(is_pad.any() and not is_pad.all() and (changes <= 1).all() and is_pad.any(axis=1).sum() > 1)


# --------------------------------------------------------------------------------
# Random draws.


@on_tape
def variance_as_deviation(reading: TapeReading) -> Found | None:
    """Find noise that is scaled by exp(v), where the loss takes the same exp(v) for a variance."""
    exponents = [op for op in reading.forward_ops if op.kind == "exp" and op.input("self") is not None]
    for op in exponents:
        source = reading.plain(op.args["self"]["v"])
        same = [each for each in exponents if reading.plain(each.args["self"]["v"]).id == source.id]
        if _scales_noise(reading, op) and any(not each.module and _is_variance(reading, each) for each in same):
            return Found(
                sites=tuple(dict.fromkeys((reading.site(op, "(model)"), "(model)"))),
                evidence=(fact("exponentials of the same number", len(same)),),
                cause=f"Noise is scaled by exp(v){reading.where(op)}, but the loss takes exp(v) for the variance: a "
                "standard deviation is the root of it.",
            )
        if not op.module and _is_variance(reading, op) and (scaled := _noise_times(reading, source.id)) is not None:
            return Found(
                sites=tuple(dict.fromkeys((reading.site(scaled, "(model)"), "(model)"))),
                evidence=(fact("exponentials of the same number", len(same)),),
                cause=f"Noise is multiplied by v itself{reading.where(scaled)}, but the loss takes exp(v) for the "
                "variance: v is its logarithm, and the standard deviation is exp(v / 2).",
            )
    return None


def _noise_times(reading: TapeReading, exponent: int) -> Op | None:
    """Return an operation that multiplies noise by a number of which the loss takes the exponential, or by its half."""
    for op in reading.forward_ops:
        pair = reading.pair(op) if op.kind.startswith("mul") else None
        for one, other in (pair, pair[::-1]) if pair is not None else ():
            if _is_noise(reading, other) and exponent in (reading.plain(one).id, _before_factor(reading, one)):
                return op
    return None


def _before_factor(reading: TapeReading, value: int) -> int | None:
    """Return what was multiplied by a number to make a value; None if that is not how it was made."""
    maker = reading.tape.producer(reading.plain(value).id)
    if maker is None or maker.kind not in ("mul", "div") or reading.pair(maker) is not None:
        return None
    source = maker.input("self")
    return None if source is None else reading.plain(source).id


def _is_variance(reading: TapeReading, op: Op) -> bool:
    """Return whether a loss takes an exponential as it is: one of which it takes the square is a deviation."""
    uses = [use for use in reading.tape.consumers(op.outs[0]) if use.phase == "forward"]
    return not _scales_noise(reading, op) and not (uses and all(_is_square(use) for use in uses))


def _is_square(op: Op) -> bool:
    if op.kind == "pow":
        return bool(number(op.args.get("exponent")) == 2)
    return op.kind == "mul" and op.input("self") == op.input("other")


def _scales_noise(reading: TapeReading, op: Op) -> bool:
    for use in reading.tape.consumers(op.outs[0]):
        others = [value for _, value in use.inputs() if value != op.outs[0]]
        if use.kind.startswith(("mul", "addcmul")) and any(_is_noise(reading, value) for value in others):
            return True
    return False


def _is_noise(reading: TapeReading, value: int) -> bool:
    maker = reading.tape.producer(value)
    return reading.tape.values[value].role == "random" or (maker is not None and maker.is_random)


# --------------------------------------------------------------------------------
# Settings.

_KNOWN: Final = {
    "Dropout": ("p", "inplace", "training"),
    "BatchNorm": ("num_features", "eps", "momentum", "affine", "track_running_stats", "training"),
    "LayerNorm": ("normalized_shape", "eps", "elementwise_affine", "training"),
    "Linear": ("in_features", "out_features", "bias", "weight", "training"),
    "Conv": ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode"),
    "LSTM": ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional"),
    "GRU": ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional"),
    "Embedding": ("num_embeddings", "embedding_dim", "padding_idx", "max_norm", "norm_type", "sparse"),
}
"""By part of a class's name: the settings that layers of torch have."""
_ALIKE: Final = 0.8


@on_tape
def idle_setting(reading: TapeReading) -> Found | None:
    """Find an attribute that was set on a module and that torch never reads."""
    for name, attributes in reading.tape.attributes.items():
        found = _odd_attribute(reading, name, attributes)
        if found is not None:
            return found
    for module in reading.tape.modules:
        found = _frozen_by_name(reading, module) or _misspelt(reading, module)
        if found is not None:
            return found
    return None


_OF_PARAMETERS: Final = ("requires_grad", "grad", "data")


def _odd_attribute(reading: TapeReading, name: str, attributes: dict[str, Any]) -> Found | None:
    """Find an attribute of a parameter whose name is nearly one that torch reads."""
    for attribute in attributes:
        meant = difflib.get_close_matches(attribute, _OF_PARAMETERS, 1, _ALIKE)
        if not meant:
            continue
        others = [each for each, found in reading.tape.attributes.items() if attribute in found]
        trained = [each for each in others if each in reading.held and _is_trained(reading, reading.held[each])]
        effect = f": {few(trained)} {by_number(trained, 'is', 'are')} trained all the same" if trained else ""
        return Found(
            sites=tuple(dict.fromkeys((*(each.rpartition(".")[0] or "(model)" for each in others[:4]), "(model)"))),
            evidence=(fact("parameters with this attribute", len(others)),),
            cause=f"`{attribute}` was set on {few(others)}, an attribute that torch never reads; `{meant[0]}` was meant"
            f"{effect}.",
            fix=f"Write {meant[0]} for {attribute}.",
        )
    return None


def _frozen_by_name(reading: TapeReading, module: ModuleInfo) -> Found | None:
    if module.settings.get("requires_grad") is not False:
        return None
    prefix = "" if module.path in ("", "(model)") else f"{module.path}."
    trained = [name for name, value in reading.held.items() if name.startswith(prefix) and _is_trained(reading, value)]
    if not trained:
        return None
    return Found(
        sites=(module.path or "(model)",),
        evidence=(fact("parameters of it that are trained all the same", len(trained)),),
        cause=f"`requires_grad = False` was set on the module {module.path}, where it has no effect: {few(trained)} "
        "are trained all the same.",
        fix=f"Call {module.path}.requires_grad_(False), which freezes its parameters.",
    )


def _is_trained(reading: TapeReading, value: int) -> bool:
    return reading.tape.values[value].requires_grad


def _misspelt(reading: TapeReading, module: ModuleInfo) -> Found | None:
    known = next((names for part, names in _KNOWN.items() if module.kind.startswith(part)), None)
    if known is None:
        return None
    for name in module.settings:
        if name in known or len(name) <= len("name"):
            continue
        meant = difflib.get_close_matches(name, known, 1, _ALIKE)
        if meant and meant[0] in module.settings:
            return Found(
                sites=(module.path,),
                evidence=(fact("settings of this name that torch reads", 0),),
                cause=f"{module.path} ({module.kind}) has an attribute `{name}`, which torch never reads: `{meant[0]}` "
                "was meant.",
                fix=f"Write {meant[0]} for {name}.",
            )
    return None
