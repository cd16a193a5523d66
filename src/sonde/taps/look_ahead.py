"""Whether a model that foretells the next token can see it: what the targets are, and where attention looks.

Targets that are the inputs moved by one are told by comparing the two. Where attention looks stands in the graph of the
first backward pass: a softmax has saved its weights, a fused attention its mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from sonde.hooks.autograd_graph import name_of, saved_by, walk
from sonde.taps.loss_functions import LossCall
from sonde.taps.plain import is_plain, is_whole
from sonde.taps.vital_sites import VitalSites
from sonde.vitals import LOOKS_AHEAD, LOOP, LOSS, NEXT_TOKEN

FIRST_LOOKS: Final = 3
MAX_TOKENS: Final = 1 << 18
MAX_FOUND: Final = 16
_MAX_WEIGHTS: Final = 1 << 22
_FORBIDDEN: Final = -1e4
_MASKS: Final = ("attn_mask", "attn_bias")


class LookAhead:
    """Compares tokens with targets in the first passes, and looks at the attention of the first backward pass."""

    def __init__(self, sites: VitalSites) -> None:
        self._sites = sites
        self._waiting: Tensor | None = None
        self._length = 0
        self._looks = 0

    def see_tokens(self, tokens: Tensor) -> None:
        """Take the whole numbers that a training pass begins with; their targets come with the loss."""
        if self._looks < FIRST_LOOKS and tokens.dim() == 2 and tokens.shape[1] > 2 and tokens.numel() <= MAX_TOKENS:
            self._waiting, self._length = tokens, int(tokens.shape[1])

    @torch.no_grad()
    def see_loss(self, call: LossCall) -> None:
        """Take the targets of the tokens that came last."""
        tokens, self._waiting = self._waiting, None
        target = call.target
        if tokens is None or target is None or not call.classes or not is_whole(target):
            return
        if target.numel() == tokens.numel() and target.device == tokens.device:
            self._looks += 1
            following = target.detach().reshape(tokens.shape)[:, :-1] == tokens[:, 1:]
            self._sites.see(LOSS, NEXT_TOKEN, following.float().mean())

    @torch.no_grad()
    def before_backward(self, root: Tensor) -> None:
        """Read where attention looks, if there were tokens."""
        if self._length:
            found = list(_ahead(root.grad_fn, self._length))
            if found and len({each.device for each in found}) == 1:
                self._sites.see(LOOP, LOOKS_AHEAD, torch.stack(found))


def _ahead(root: Any, length: int) -> Iterator[Tensor]:
    """Yield for each attention of a sequence to itself which part of its weight, or of its mask, lies ahead."""
    found = 0
    for node in walk(root):
        weights = _weights(node, length)
        if weights is not None and found < MAX_FOUND:
            found += 1
            yield weights.triu(1).sum((-2, -1)).float().mean() / length


def _weights(node: Any, length: int) -> Tensor | None:
    """Return what an attention of every place to every place has saved: its weights, or which of them may be."""
    name = name_of(node)
    if name == "SoftmaxBackward0":
        result = saved_by(node, "result")
        square = is_plain(result) and result.dim() >= 3 and result.shape[-2:] == (length, length)
        return result.detach() if square and result.numel() <= _MAX_WEIGHTS else None
    if not name.startswith("ScaledDotProduct"):
        return None
    query, key = saved_by(node, "query"), saved_by(node, "key")
    if not (is_plain(query) and is_plain(key)) or query.shape[-2] != length or key.shape[-2] != length:
        return None
    whole = torch.full((length, length), 1 / length, device=query.device)
    if saved_by(node, "is_causal"):
        return whole.tril()
    mask = next((each for each in (saved_by(node, name) for name in _MASKS) if isinstance(each, Tensor)), None)
    if mask is None:
        return whole
    allowed = mask if mask.dtype == torch.bool else mask > _FORBIDDEN
    return whole * allowed if allowed.shape[-2:] == (length, length) else None
