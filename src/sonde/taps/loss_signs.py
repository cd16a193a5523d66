"""Vital signs of the loss: what its input looks like by rows and by columns, sampled."""

from __future__ import annotations

from collections import Counter
from typing import Final

import torch
from torch import Tensor

from sonde.taps.labels import LabelSigns, entropy_of, tally
from sonde.taps.loss_functions import LossCall
from sonde.taps.plain import MAX_ELEMENTS, is_real, is_whole, sample_columns, spread_rows
from sonde.taps.vital_sites import VitalSites
from sonde.vitals import (
    COLUMN_LOG_Z,
    COLUMN_SUM,
    LOG_Z,
    LOSS,
    PREDICTED_ENTROPY,
    ROW_MIN,
    ROW_SUM,
    SAMPLE_SPREAD,
    TARGET_SPREAD,
    ZERO_SHARE,
)

# Odd periods: where two optimizers take turns, an even one would only ever meet one of them.
FIRST_LOOKS: Final = 10
LOOK_EVERY: Final = 21
LABELS_EVERY: Final = 5


class LossSigns:
    """Looks at training losses: each of the first ten calls, then each 21st; at labels each fifth."""

    def __init__(self, sites: VitalSites) -> None:
        self._sites = sites
        self._looks: Counter[int] = Counter()
        self._labels = LabelSigns(sites)

    @torch.no_grad()
    def see(self, call: LossCall) -> None:
        """Take a training call of a loss function."""
        look = self._looks[call.number]
        self._looks[call.number] += 1
        often = look < FIRST_LOOKS
        if is_real(call.values) and call.values.numel() and (often or look % LOOK_EVERY == 0):
            self._see_values(call)
            if call.target is not None and is_real(call.target) and len(call.target.shape) and len(call.target) > 1:
                self._write(TARGET_SPREAD, _spread(call.target), call)
        if call.classes and is_whole(call.target) and (often or look % LABELS_EVERY == 0):
            self._labels.see(call, call.classes)
        elif _is_binary(call) and (often or look % LABELS_EVERY == 0):
            self._labels.see_binary(call)

    def _see_values(self, call: LossCall) -> None:
        values, dim = call.values.detach(), call.class_dim
        if values.dim() and len(values) > 1:
            self._write(SAMPLE_SPREAD, _spread(values), call)
        if dim is None:
            return
        rows = spread_rows(values, dim).float()
        self._write(ROW_SUM, rows.sum(1), call)
        self._write(ROW_MIN, rows.amin(1), call)
        self._write(ZERO_SHARE, (rows == 0).float().mean(), call)
        logarithmic = call.kind in ("cross_entropy", "nll_loss")
        if values.dim() == 2 and values.numel() <= MAX_ELEMENTS:
            self._write(COLUMN_SUM, values.float().sum(0), call)
            if logarithmic:
                self._write(COLUMN_LOG_Z, values.float().logsumexp(0), call)
        if logarithmic:
            self._write(LOG_Z, rows.logsumexp(1), call)
        if call.classes and call.classes > 1:
            self._write(PREDICTED_ENTROPY, entropy_of(tally(rows.argmax(1), call.classes)), call)

    def _write(self, name: str, values: Tensor, call: LossCall) -> None:
        self._sites.see(LOSS, name, values, call=call.number)


def _is_binary(call: LossCall) -> bool:
    """Say whether a loss asks one question of each sample."""
    asks = call.kind in ("binary_cross_entropy", "binary_cross_entropy_with_logits")
    return asks and is_real(call.values) and call.values.dim() > 0 and call.values.numel() == len(call.values)


def _spread(values: Tensor) -> Tensor:
    """Return the variance across samples, averaged over everything else."""
    return sample_columns(values).var(0, correction=0).mean()
