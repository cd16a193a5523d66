"""See the attention calls that run while a module computes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sonde.probes.attention import EVERYTHING, Attention, Choice, explain_attention, explain_multi_head

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

    From outside, so that the module may take its own fast path, which no scope sees into.
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
