"""Keep attention weights, also of modules that do not return them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from sonde.debuggers.forward_debugger import ForwardDebugger
from sonde.debuggers.samples import per_sample
from sonde.hooks.unpack import unpack
from sonde.probes import Attention, AttentionCalls, Choice, explain_module, find_returned, head_statistics


class _Inside(threading.local):
    """The state of one thread for the current call of the layer."""

    calls: AttentionCalls | None = None
    arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None


class AttentionDebugger(ForwardDebugger):
    """Captures attention weights with the entropy and the peak of every head, and how much attention each key gets.

    Detected are `nn.MultiheadAttention`, with any `need_weights`; every call of `F.scaled_dot_product_attention` inside
    the layer, recomputed and compared with the output of the fused kernel (`max_difference`); and weights that the
    layer returns. `heads` and `rows` keep only some heads and queries.
    """

    def __init__(
        self, layer_name: str, *, heads: Sequence[int] | None = None, rows: Sequence[int] | None = None
    ) -> None:
        super().__init__(layer_name)
        self.heads = heads
        self.rows = rows
        self._inside = _Inside()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without what belongs to threads."""
        return {name: value for name, value in super().__getstate__().items() if name != "_inside"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, whose threads have captured nothing yet."""
        self.__dict__.update(state, _inside=_Inside())

    def around_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AbstractContextManager[Any]:
        """Remember the arguments of the layer, and record the attention calls inside it."""
        inside = self._inside
        inside.calls, inside.arguments = None, (args, kwargs)
        if isinstance(module, nn.MultiheadAttention):
            return contextlib.nullcontext()
        inside.calls = AttentionCalls(Choice(self.heads, self.rows))
        return inside.calls

    def process_forward(self, module: nn.Module, input: Any, output: Any) -> dict[str, Any]:
        """Return the weights and their statistics."""
        inside = self._inside
        try:
            found = [self._describe(attention) for attention in self._find(module, input, output, inside)]
        finally:
            inside.calls = inside.arguments = None
        if not found:
            kind = type(module).__name__
            return {
                "error": f"{kind} neither returns attention weights nor calls scaled_dot_product_attention",
                "layer_name": self.layer_name,
            }
        return found[0] if len(found) == 1 else {f"#{index}": each for index, each in enumerate(found)}

    def _find(self, module: nn.Module, args: Any, output: Any, inside: _Inside) -> Iterator[Attention]:
        choice = Choice(self.heads, self.rows)
        if isinstance(module, nn.MultiheadAttention):
            positional, named = inside.arguments or (args, {})
            yield explain_module(module, positional, named, output, choice)
        elif inside.calls is not None and inside.calls.seen:
            yield from inside.calls.seen
        else:
            returned = find_returned([tensor for _, tensor in unpack(output)])
            if returned is not None:
                yield Attention(choice.of(returned), "returned")

    def _describe(self, attention: Attention) -> dict[str, Any]:
        stats = head_statistics(attention.weights)
        if attention.max_difference is not None:
            stats["max_difference"] = attention.max_difference
        # [batch, heads, keys]: the mean attention that each key gets.
        keys = attention.weights.mean(-2)
        return {
            "attention_map": attention.weights,
            "attention_stats": per_sample(
                [row | {"attention_distribution": each} for row, each in zip(_rows(stats), keys, strict=True)]
            ),
            "source": attention.source,
            "layer_name": self.layer_name,
        }


def _rows(stats: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Return a dict for each sample from [batch, heads] numbers, with one transfer."""
    names = [name for name, values in stats.items() if values.dim() == 2]
    single = [name for name, values in stats.items() if values.dim() == 1]
    heads = torch.stack([stats[name] for name in names], 1).cpu()
    rest = {name: stats[name].tolist() for name in single}
    return [
        {name: heads[sample, index] for index, name in enumerate(names)}
        | {name: values[sample] for name, values in rest.items()}
        for sample in range(len(heads))
    ]
