"""The operations of a tape as functions of torch on the CPU: lookup, stand-ins for other devices, flags of modes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from sonde.forensics import permitted

FUSED_DROPOUT: Final = "aten.native_dropout.default"
_BATCH_NORMS: Final = frozenset({"aten.native_batch_norm.default", "aten.cudnn_batch_norm.default"})
_RNN_LAYER: Final = "aten.mkldnn_rnn_layer.default"
_LSTM: Final = 2  # its number among the modes of recurrent layers
_MOST_HIDDEN: Final = 1 << 20
DRAWN_MASKS: Final = frozenset({"aten.bernoulli_.float", "aten.bernoulli.p"})


class CannotRepeat(Exception):
    """Raised where the taped step cannot be repeated; the message says why."""


@functools.cache
def find(name: str) -> Callable[..., Any]:
    """Return the function of an operation such as `aten.addmm.default`.

    Raises:
        CannotRepeat: It is unknown here, or may not be called.

    """
    if name in _STAND_INS:
        return _STAND_INS[name]
    if name == _RNN_LAYER:
        return _rnn_layer
    namespace, _, rest = name.partition(".")
    operation, _, kind = rest.rpartition(".")
    found = permitted.overload(operation, kind) if namespace == "aten" else None
    if found is None:
        raise CannotRepeat(f"the operation {name} cannot be repeated here")
    return found


def _rnn_layer(*arguments: Any) -> Any:
    """Run a layer of an LSTM, whose kernel trusts the sizes it is given, after a look at them."""
    given, hidden = arguments[0], arguments[10]
    gates, rest = arguments[1:5], arguments[5:7]
    fits = (
        all(isinstance(each, Tensor) and each.dtype == torch.float32 for each in (given, *gates, *rest))
        and isinstance(hidden, int)
        and 0 < hidden <= _MOST_HIDDEN
        and given.dim() == 3
        and [tuple(each.shape) for each in gates] == _gate_shapes(given.shape[2], hidden, bool(arguments[12]))
        and all(tuple(each.shape) == (given.shape[1], hidden) for each in rest)
        and arguments[8:10] == ([], _LSTM)
    )
    if not fits:
        raise CannotRepeat(f"the operation {_RNN_LAYER} cannot be repeated with these sizes")
    return torch.ops.aten.mkldnn_rnn_layer.default(*arguments)


def _gate_shapes(inputs: int, hidden: int, has_biases: bool) -> list[tuple[int, ...]]:
    weights: list[tuple[int, ...]] = [(4 * hidden, inputs), (4 * hidden, hidden)]
    return weights + ([(4 * hidden,)] * 2 if has_biases else weights)


def bind(name: str, given: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of an operation by position and by name; a tape leaves out those that were None."""
    schema = getattr(find(name), "_schema", None)
    if schema is None:
        schema = _signature(name)
    positional, named = [], {}
    for argument in schema.arguments:
        if argument.kwarg_only:
            if argument.name in given:
                named[argument.name] = given[argument.name]
        else:
            positional.append(given.get(argument.name))
    return positional, named


def _signature(name: str) -> Any:
    operation, _, overload = name.partition(".")[2].rpartition(".")
    return getattr(getattr(torch.ops.aten, operation), overload)._schema


def is_dropout(name: str) -> bool:
    """Return whether an operation is the draw of a dropout, alone or fused."""
    return name in DRAWN_MASKS or name == FUSED_DROPOUT


def in_eval_mode(name: str, arguments: list[Any]) -> Any:
    """Return what the draw of a dropout gives in evaluation: the mean of the draws, which the scaling makes one."""
    if name == FUSED_DROPOUT:
        return arguments[0].clone(), torch.ones_like(arguments[0], dtype=torch.bool)
    if name == "aten.bernoulli_.float":
        with torch.no_grad():
            return arguments[0].fill_(arguments[1])
    return torch.full_like(arguments[0], arguments[1])


def without_training(name: str, arguments: list[Any]) -> list[Any]:
    """Return the arguments of a batch norm with the flag of training off, if it has running statistics."""
    if name in _BATCH_NORMS and arguments[3] is not None:
        return [*arguments[:5], False, *arguments[6:]]
    return arguments


def _batch_norm(*arguments: Any) -> Any:
    out = torch.ops.aten.native_batch_norm.default(*arguments)
    return (*out, torch.empty(0, dtype=torch.uint8))


def _attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Any:
    dropout, causal = rest[0] if rest else 0.0, bool(rest[1]) if len(rest) > 1 else False
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=causal, scale=named.get("scale")
    )
    return (out,)


def _masked_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *rest: Any, **named: Any) -> Any:
    dropout, causal = rest[1] if len(rest) > 1 else 0.0, bool(rest[2]) if len(rest) > 2 else False
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, dropout_p=dropout, is_causal=causal, scale=named.get("scale")
    )
    return (out,)


_STAND_INS: Final[dict[str, Callable[..., Any]]] = {
    "aten.cudnn_batch_norm.default": _batch_norm,
    "aten._scaled_dot_product_flash_attention.default": _attention,
    "aten._scaled_dot_product_efficient_attention.default": _masked_attention,
    "aten._scaled_dot_product_cudnn_attention.default": _masked_attention,
}
"""Fused operations of other devices, by what computes the same on a CPU. What they return beside it is not used."""
