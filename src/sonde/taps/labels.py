"""Vital signs of class labels: how mixed a batch is, and all batches so far. Nothing waits for the device."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from sonde.taps.loss_functions import LossCall
from sonde.taps.vital_sites import VitalSites
from sonde.vitals import (
    LABEL_COUNTS,
    LABEL_ENTROPY,
    LABEL_RUN,
    LOSS,
    PREDICTED_ENTROPY,
    RUNNING_LABEL_ENTROPY,
    VALID_TARGETS,
)

MAX_LABELS: Final = 1 << 16
_IGNORED: Final = -1


def tally(labels: Tensor, classes: int) -> Tensor:
    """Count labels by class, leaving out what is no class. By sorting: a bincount would wait for the device."""
    ordered = labels.flatten().sort().values
    every = torch.arange(classes, device=labels.device, dtype=ordered.dtype)
    counts = torch.searchsorted(ordered, every, right=True) - torch.searchsorted(ordered, every)
    return counts.float()


def entropy_of(counts: Tensor) -> Tensor:
    """Return the entropy, in nats, of a distribution given by counts."""
    share = counts / counts.sum().clamp(min=1)
    total: Tensor = -torch.special.xlogy(share, share).sum()
    return total


class LabelSigns:
    """Looks at the labels that a loss is given, and keeps a running count on their device."""

    def __init__(self, sites: VitalSites) -> None:
        self._sites = sites
        self._running: dict[tuple[int, int], Tensor] = {}

    def see(self, call: LossCall, classes: int) -> None:
        """Take the labels of a training batch."""
        target = call.target
        if target is None or not target.numel() or target.numel() > MAX_LABELS:
            return
        labels = target.detach().to(torch.int64)
        ignored = call.settings.get("ignore_index")
        valid = labels.ne(ignored if isinstance(ignored, int) else -100)
        counts = tally(labels.where(valid, _IGNORED), classes)
        self._write(VALID_TARGETS, valid.sum(), call)
        self._write(LABEL_COUNTS, counts, call)
        self._write(LABEL_ENTROPY, entropy_of(counts), call)
        self._write(RUNNING_LABEL_ENTROPY, entropy_of(self._add(call.number, counts)), call)
        if labels.dim() == 1 and len(labels) > 1:
            self._write(LABEL_RUN, (labels[1:] == labels[:-1]).float().mean(), call)

    def see_binary(self, call: LossCall) -> None:
        """Take the yes and no of a training batch: one number per sample, as likely as not where it is a half."""
        target = call.target
        if target is None or not 0 < target.numel() <= MAX_LABELS:
            return
        counts = tally((target.detach() > 0.5).to(torch.int64), 2)
        self._write(LABEL_COUNTS, counts, call)
        self._write(RUNNING_LABEL_ENTROPY, entropy_of(self._add(call.number, counts)), call)
        answers = call.values.detach() > (0.5 if call.kind == "binary_cross_entropy" else 0)
        self._write(PREDICTED_ENTROPY, entropy_of(tally(answers.to(torch.int64), 2)), call)

    def _add(self, number: int, counts: Tensor) -> Tensor:
        key = (number, len(counts))
        before = self._running.get(key)
        # In float64 counts stay exact; float32 is all that some devices have.
        wide = counts if counts.device.type == "mps" else counts.double()
        if before is None or before.device != counts.device:
            before = torch.zeros_like(wide)
        self._running[key] = before + wide
        return self._running[key]

    def _write(self, name: str, values: Tensor, call: LossCall) -> None:
        self._sites.see(LOSS, name, values, call=call.number)
