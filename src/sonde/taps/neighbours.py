"""Whether inputs that look alike have the same label, over the first few hundred samples."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from sonde.taps.loss_functions import LossCall
from sonde.taps.plain import is_whole
from sonde.taps.vital_sites import VitalSites
from sonde.vitals import LOSS, NEIGHBOUR_AGREEMENT

MAX_SAMPLES: Final = 512
MAX_FEATURES: Final = 1024
PER_BATCH: Final = 64
MIN_SAMPLES: Final = 64
# Words are counted in this many bins.
WORDS: Final = 256
# Batches after which to compare what there is, if samples are few.
MAX_BATCHES: Final = 40
# Batches after which to give up, if none came with a label per sample: as in a language model.
MAX_UNFIT: Final = 8


class Neighbours:
    """Keeps small copies of inputs with their labels; when there are enough, compares each with its nearest."""

    def __init__(self, sites: VitalSites) -> None:
        self._sites = sites
        self._inputs: list[Tensor] = []
        self._labels: list[Tensor] = []
        self._waiting: Tensor | None = None
        self._batch_size = 0
        self._offered = 0
        self._done = False

    @torch.no_grad()
    def see_input(self, values: Tensor) -> None:
        """Take the input of a training pass; its labels come with the loss."""
        if self._is_done() or values.dim() < 2:
            return
        self._offered += 1
        features = values[:PER_BATCH].flatten(1)
        step = -(-features.shape[1] // MAX_FEATURES) if features.shape[1] else 1
        self._waiting = features[:, ::step].float().clone()
        self._batch_size = len(values)

    @torch.no_grad()
    def see_tokens(self, tokens: Tensor) -> None:
        """Take rows of whole numbers: alike are those with the same words in them, in whatever order."""
        if self._is_done() or tokens.dim() != 2 or tokens.shape[1] < 2:
            return
        self._offered += 1
        rows = tokens[:PER_BATCH].long()
        words = torch.zeros(len(rows), WORDS, device=rows.device)
        # What most rows end in is padding: that two texts are of one length makes them no more alike.
        counts = (rows != rows[:, -1].mode().values).float()
        self._waiting = words.scatter_add_(1, rows.remainder(WORDS), counts)
        self._batch_size = len(tokens)

    @torch.no_grad()
    def see_loss(self, call: LossCall) -> None:
        """Take the labels of the input that came last."""
        waiting, self._waiting = self._waiting, None
        target = call.target
        if self._done or waiting is None or target is None or not call.classes or not is_whole(target):
            return
        fits = target.dim() == 1 and len(target) == self._batch_size and target.device == waiting.device
        if not fits or (self._inputs and self._inputs[0].shape[1:] != waiting.shape[1:]):
            return
        self._inputs.append(waiting)
        self._labels.append(target.detach()[:PER_BATCH].clone())
        if len(self._inputs) >= MAX_BATCHES or sum(map(len, self._inputs)) >= MAX_SAMPLES:
            self._finish()

    def _is_done(self) -> bool:
        if not self._done and self._offered >= (2 * MAX_BATCHES if self._inputs else MAX_UNFIT):
            self._finish()
        return self._done

    def _finish(self) -> None:
        if sum(map(len, self._inputs)) >= MIN_SAMPLES:
            self._compare(torch.cat(self._inputs), torch.cat(self._labels))
        self._done = True
        self._inputs, self._labels, self._waiting = [], [], None

    def _compare(self, inputs: Tensor, labels: Tensor) -> None:
        with torch.autocast(inputs.device.type, enabled=False):
            squares = inputs.square().sum(1)
            sizes = squares[:, None] + squares[None, :]
            distances = sizes - 2 * (inputs @ inputs.T)
        # The same sample in a later epoch has the same label, right or wrong: it says nothing.
        distances = distances.masked_fill(distances <= 1e-5 * sizes, float("inf"))
        nearest = distances.fill_diagonal_(float("inf")).argmin(1)
        self._sites.see(LOSS, NEIGHBOUR_AGREEMENT, (labels[nearest] == labels).float())
