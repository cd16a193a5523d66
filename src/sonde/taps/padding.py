"""Padding that counts in the loss: rows of tokens that end in one and the same, each time with the same label."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from sonde.taps.loss_functions import LossCall
from sonde.taps.plain import is_whole
from sonde.taps.vital_sites import VitalSites
from sonde.vitals import COUNTED_PADDING, LOSS

FIRST_LOOKS: Final = 10
MAX_TOKENS: Final = 1 << 18
# Torch finds the most frequent of more numbers than this by a way that waits for the device.
MAX_ROWS: Final = 2048


class Padding:
    """Compares the tokens that a model is given with the labels that the loss is given, in the first passes."""

    def __init__(self, sites: VitalSites) -> None:
        self._sites = sites
        self._waiting: Tensor | None = None
        self._looks = 0

    def see_tokens(self, tokens: Tensor) -> None:
        """Take the whole numbers that a training pass begins with; their labels come with the loss."""
        fits = tokens.dim() == 2 and tokens.shape[1] > 1 and len(tokens) <= MAX_ROWS and tokens.numel() <= MAX_TOKENS
        if self._looks < FIRST_LOOKS and fits:
            self._waiting = tokens

    @torch.no_grad()
    def see_loss(self, call: LossCall) -> None:
        """Take the labels of the tokens that came last."""
        tokens, self._waiting = self._waiting, None
        target = call.target
        if tokens is None or target is None or not call.classes or not is_whole(target):
            return
        if target.numel() != tokens.numel() or target.device != tokens.device:
            return
        self._looks += 1
        ignored = call.settings.get("ignore_index")
        labels = target.detach().reshape(tokens.shape)
        self._sites.see(LOSS, COUNTED_PADDING, _share(tokens, labels, ignored if isinstance(ignored, int) else -100))


def _share(tokens: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """Return the share of positions that are padding and count; 0 if there is none, or if it does not look like it.

    The token that most rows end in is padding if nothing else ever follows it, and all its labels are the same.
    """
    last = tokens[:, -1].mode().values
    padded = tokens == last
    # Once padding has begun, it goes on to the end of the row.
    closed = (padded[:, 1:] | ~padded[:, :-1]).all()
    highest = labels.where(padded, labels.min()).max()
    lowest = labels.where(padded, labels.max()).min()
    alike = (highest == lowest) & (highest != ignored)
    # A row of one word says nothing: somewhere there must be something else than padding, in most rows.
    some = (~padded[:, 0]).float().mean() > 0.5
    return padded.float().mean() * (closed & alike & some)
