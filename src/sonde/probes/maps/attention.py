"""Attention weights: written out for calls that never materialise them, and what they look like per head."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

# How far the sum of a row of weights may be from 1 (bfloat16 keeps 8 bits).
_ROW_SUM_TOLERANCE: Final = 2e-2

Source = Literal["returned", "recomputed"]


@dataclass(frozen=True, slots=True)
class Attention:
    """The weights of one attention call: [batch, heads, queries, keys].

    `max_difference` holds, per sample, the largest distance between what the model computed and what these weights
    give; None where there was nothing to compare with.
    """

    weights: Tensor
    source: Source
    max_difference: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """Which heads and query rows to keep; None keeps all."""

    heads: Sequence[int] | None = None
    rows: Sequence[int] | None = None

    def of(self, weights: Tensor) -> Tensor:
        """Return the chosen part of [..., heads, rows, anything]."""
        if self.heads is not None:
            weights = weights[..., list(self.heads), :, :]
        return weights[..., list(self.rows), :] if self.rows is not None else weights


EVERYTHING: Final = Choice()


def explain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    output: Tensor | None = None,
    choice: Choice = EVERYTHING,
) -> Attention:
    """Write out the weights of `F.scaled_dot_product_attention`, and check them against the output it gave.

    Takes the function's own arguments. Computed in float32; dropout is left out, and then there is nothing to check.
    Only the chosen heads and rows are computed.
    """
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    bias = _bias(query, key, attn_mask, is_causal)
    if query.dim() > 2:
        if choice.heads is not None:
            heads = list(choice.heads)
            key, value = key[..., heads, :, :], value[..., heads, :, :]
        query, bias = choice.of(query), None if bias is None else _choose_bias(bias, choice)
    scores = query.float() @ key.float().transpose(-2, -1)
    scores *= 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    weights = _softmax(scores if bias is None else scores + bias)
    difference = None
    if output is not None and dropout_p == 0.0:
        expected = choice.of(output) if output.dim() > 2 else output
        difference = _largest(weights @ value.float() - expected.float())
    return Attention(_with_heads(weights), "recomputed", difference)


def _bias(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor | None:
    """Return what is added to the scores: 0 or -inf for a mask of yes and no, else the mask's own values."""
    if is_causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if mask is None:
        return None
    if hasattr(mask, "_materialize"):  # torch.nn.attention.bias.CausalBias holds no values until asked
        mask = mask._materialize(query.device)
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, -math.inf)
    return mask.float()


def _choose_bias(bias: Tensor, choice: Choice) -> Tensor:
    if choice.heads is not None and bias.dim() > 2 and bias.shape[-3] > 1:
        bias = bias[..., list(choice.heads), :, :]
    if choice.rows is not None and bias.shape[-2] > 1:
        bias = bias[..., list(choice.rows), :]
    return bias


def _softmax(scores: Tensor) -> Tensor:
    """Return the softmax; a query that may look at nothing looks at nothing, as in torch, instead of being NaN."""
    nowhere = (scores == -math.inf).all(-1, keepdim=True)
    return torch.softmax(scores, -1).masked_fill_(nowhere, 0.0)


def _largest(difference: Tensor) -> Tensor:
    if difference.dim() <= 3:
        return difference.abs().amax().reshape(1)
    return difference.abs().flatten(1).amax(1)


def _with_heads(weights: Tensor) -> Tensor:
    """Give weights the shape [batch, heads, queries, keys]; with fewer axes they have one head."""
    if weights.dim() == 2:
        return weights[None, None]
    return weights[:, None] if weights.dim() == 3 else weights.flatten(1, -3)


def explain_multi_head(arguments: dict[str, Any], output: Any, choice: Choice, *, batched: bool) -> Attention:
    """Write out the weights of `F.multi_head_attention_forward`, called with `arguments`, which gave `output`."""
    asked: dict[str, Any] = {"need_weights": True, "average_attn_weights": False, "training": False, "dropout_p": 0.0}
    again, weights = F.multi_head_attention_forward(**(arguments | asked))
    assert weights is not None  # they were asked for
    weights = weights if batched else weights.unsqueeze(0)
    dropped = arguments.get("training", True) and arguments["dropout_p"] > 0.0
    given = output[0] if isinstance(output, tuple) else output
    difference = None
    if isinstance(given, Tensor) and given.shape == again.shape and not dropped:
        apart = (again.float() - given.float()).abs()
        difference = apart.transpose(0, 1).flatten(1).amax(1) if batched else apart.amax().reshape(1)
    return Attention(choice.of(weights), "recomputed", difference)


def find_returned(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the first tensor that is made of rows of weights: none negative, each summing to 1 (or to 0)."""
    return next((_with_heads(tensor.detach()) for tensor in tensors if is_attention(tensor)), None)


def is_attention(tensor: Tensor) -> bool:
    """Return whether the last axis of a tensor holds rows of weights."""
    if tensor.layout is not torch.strided or not tensor.is_floating_point():
        return False
    if tensor.dim() < 2 or tensor.numel() == 0 or tensor.shape[-1] == 1:
        return False
    sums = tensor.detach().sum(-1, dtype=torch.float32)
    like_weights = ((sums - 1).abs() < _ROW_SUM_TOLERANCE) | (sums == 0)
    # One number to wait for, and only here: whether a tensor holds weights decides what is kept.
    return bool(like_weights.all() & (tensor.detach().amin() >= 0) & (sums != 0).any())


def head_statistics(weights: Tensor) -> dict[str, Tensor]:
    """Return, for every sample and head, how weights are spread over keys; [batch, heads] each.

    `entropy` (in nats) and `peak` (the largest weight of a row) are means over those rows that look anywhere;
    `max_attention` is the largest weight of all. A head none of whose rows looks anywhere has NaN and 0.
    """
    w = weights.float()
    rows = w.sum(-1) > 0
    count = rows.sum(-1)
    # xlogy is 0 at 0, so no small number needs to be added under the logarithm.
    entropy = -torch.special.xlogy(w, w).sum(-1)
    peak = w.amax(-1)
    return {
        "entropy": (entropy * rows).sum(-1) / count,
        "peak": (peak * rows).sum(-1) / count,
        "max_attention": peak.amax(-1),
    }


# --------------------------------------------------------------------------------
# See the attention calls that run while a module computes.


_MULTI_HEAD: Final = inspect.signature(F.multi_head_attention_forward)


class AttentionCalls(TorchFunctionMode):
    """A scope in which every fused attention call of this thread is written out, as soon as it is made.

    `F.scaled_dot_product_attention` is seen however it was imported, and so is `nn.MultiheadAttention`. Nothing that
    the model computes is changed. At once, because what went in may be overwritten later.
    """

    def __init__(self, choice: Choice = EVERYTHING) -> None:
        super().__init__()
        self.seen: list[Attention] = []
        self._choice = choice

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a torch function, and look at it if it is one of attention."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            with torch.no_grad():
                self.seen.append(explain_attention(*args, **kwargs, output=output, choice=self._choice))
        elif func is F.multi_head_attention_forward:
            arguments = _MULTI_HEAD.bind(*args, **kwargs)
            arguments.apply_defaults()
            with torch.no_grad():
                batched = arguments.arguments["query"].dim() == 3
                self.seen.append(explain_multi_head(arguments.arguments, output, self._choice, batched=batched))
        return output


@torch.no_grad()
def explain_module(
    module: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, choice: Choice
) -> Attention:
    """Write out the weights of one call of a module, from what it was called with.

    From outside, so that the module may take its own fast path, which cannot be hooked.
    """
    call = inspect.signature(nn.MultiheadAttention.forward).bind(module, *args, **kwargs)
    call.apply_defaults()
    asked = call.arguments
    query, key, value = (_time_first(asked[name], module) for name in ("query", "key", "value"))
    mask = F._canonical_mask(asked["attn_mask"], "attn_mask", None, "", query.dtype, check_other=False)
    padding = F._canonical_mask(asked["key_padding_mask"], "key_padding_mask", None, "", query.dtype, check_other=False)
    arguments: dict[str, Any] = {
        "query": query,
        "key": key,
        "value": value,
        "embed_dim_to_check": module.embed_dim,
        "num_heads": module.num_heads,
        "in_proj_weight": module.in_proj_weight,
        "in_proj_bias": module.in_proj_bias,
        "bias_k": module.bias_k,
        "bias_v": module.bias_v,
        "add_zero_attn": module.add_zero_attn,
        "dropout_p": module.dropout,
        "out_proj_weight": module.out_proj.weight,
        "out_proj_bias": module.out_proj.bias,
        "training": module.training,
        "key_padding_mask": padding,
        "attn_mask": mask,
        "is_causal": asked["is_causal"],
        "use_separate_proj_weight": not module._qkv_same_embed_dim,
        "q_proj_weight": module.q_proj_weight,
        "k_proj_weight": module.k_proj_weight,
        "v_proj_weight": module.v_proj_weight,
    }
    batched = query.dim() == 3
    given = output[0] if isinstance(output, tuple) else output
    return explain_multi_head(arguments, _time_first(given, module), choice, batched=batched)


def _time_first(tensor: Tensor, module: nn.MultiheadAttention) -> Tensor:
    return tensor.transpose(0, 1) if module.batch_first and tensor.dim() == 3 else tensor
