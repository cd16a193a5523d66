"""Sensors for labels and targets. Nothing waits for the device."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from sonde.core.signals import (
    COUNTED_PADDING,
    LABEL_COUNTS,
    LABEL_ENTROPY,
    LABEL_RUN,
    LOSS,
    NEIGHBOUR_AGREEMENT,
    PREDICTED_ENTROPY,
    RUNNING_LABEL_ENTROPY,
    TARGET_SPREAD,
    VALID_TARGETS,
)
from sonde.schedule import every, first
from sonde.sensors.loss_functions import LossCall
from sonde.sensors.sensor import Context, PassInputs, Sensor
from sonde.sensors.tensors import is_real, is_whole, sample_columns

MAX_LABELS: Final = 1 << 16
_IGNORED: Final = -1
MAX_TOKENS: Final = 1 << 18
# Torch finds the most frequent of more numbers than this by a way that waits for the device.
MAX_ROWS: Final = 2048
MAX_SAMPLES: Final = 512
MAX_FEATURES: Final = 1024
PER_BATCH: Final = 64
MIN_SAMPLES: Final = 64
# A nearest sample must be nearer than half of all others are, by more than rounding.
NEARER: Final = 0.999
# Words are counted in this many bins.
WORDS: Final = 256
# Batches after which to compare what there is, if samples are few.
MAX_BATCHES: Final = 40
# Batches after which to give up, if none came with a label per sample: as in a language model.
MAX_UNFIT: Final = 8


def tally(labels: Tensor, classes: int) -> Tensor:
    """Count labels by class, leaving out other values. By sorting: a bincount would wait for the device."""
    ordered = labels.flatten().sort().values
    every = torch.arange(classes, device=labels.device, dtype=ordered.dtype)
    counts = torch.searchsorted(ordered, every, right=True) - torch.searchsorted(ordered, every)
    return counts.float()


def entropy_of(counts: Tensor) -> Tensor:
    """Return the entropy, in nats, of a distribution given by counts."""
    share = counts / counts.sum().clamp(min=1)
    total: Tensor = -torch.special.xlogy(share, share).sum()
    return total


def spread_of(values: Tensor) -> Tensor:
    """Return the variance across samples, averaged over everything else."""
    return sample_columns(values).var(0, correction=0).mean()


class TargetSpread(Sensor):
    """The variance of a target of real numbers across the batch. Counts the calls of a loss."""

    produces = (TARGET_SPREAD,)
    # An odd period: where two optimizers take turns, an even one would only ever see one of them.
    when = first(10) | every(21)
    cost = "one pass over at most 256 samples of the target"

    @torch.no_grad()
    def on_loss(self, call: LossCall) -> None:
        """Look at the target."""
        if not self.is_look(call.number) or not is_real(call.values) or not call.values.numel():
            return
        target = call.target
        if target is not None and is_real(target) and target.dim() and len(target) > 1:
            self.signals.see(LOSS, TARGET_SPREAD, spread_of(target), call=call.number)


class Labels(Sensor):
    """How mixed the labels of a batch are, and of all batches so far. Counts the calls of a loss."""

    produces = (
        VALID_TARGETS,
        LABEL_COUNTS,
        LABEL_ENTROPY,
        RUNNING_LABEL_ENTROPY,
        LABEL_RUN,
        PREDICTED_ENTROPY,
    )
    when = first(10) | every(5)
    cost = "a sort of at most 65,536 labels"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._running: dict[tuple[int, int], Tensor] = {}

    @torch.no_grad()
    def on_loss(self, call: LossCall) -> None:
        """Look at the labels that a loss is given."""
        if not self.is_look(call.number):
            return
        if call.classes and is_whole(call.target):
            self._see(call, call.classes)
        elif _is_binary(call):
            self._see_binary(call)

    def _see(self, call: LossCall, classes: int) -> None:
        """Count the labels of a training batch."""
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

    def _see_binary(self, call: LossCall) -> None:
        """Count the binary labels of a training batch: one number per sample, undecided where it is a half."""
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
        self.signals.see(LOSS, name, values, call=call.number)


def _is_binary(call: LossCall) -> bool:
    """Return whether a loss asks one question of each sample."""
    asks = call.kind in ("binary_cross_entropy", "binary_cross_entropy_with_logits")
    return asks and is_real(call.values) and call.values.dim() > 0 and call.values.numel() == len(call.values)


class Padding(Sensor):
    """Padding that counts in the loss: rows of tokens that end in one and the same, each time with the same label.

    Counts the passes that could be compared.
    """

    produces = (COUNTED_PADDING,)
    when = first(10)
    cost = "a few passes over at most 262,144 tokens and their labels"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._waiting: Tensor | None = None
        self._compared = 0

    def on_tokens(self, tokens: Tensor) -> None:
        """Keep the tokens that a training pass begins with; their labels come with the loss."""
        fits = tokens.dim() == 2 and tokens.shape[1] > 1 and len(tokens) <= MAX_ROWS and tokens.numel() <= MAX_TOKENS
        if fits and self.when(self._compared):
            self._waiting = tokens

    @torch.no_grad()
    def on_loss(self, call: LossCall) -> None:
        """Compare the labels with the tokens that came last."""
        tokens, self._waiting = self._waiting, None
        target = call.target
        if tokens is None or target is None or not call.classes or not is_whole(target):
            return
        if target.numel() != tokens.numel() or target.device != tokens.device:
            return
        self._compared += 1
        if not self.when(self._compared):
            self.finish()
        ignored = call.settings.get("ignore_index")
        labels = target.detach().reshape(tokens.shape)
        self.signals.see(LOSS, COUNTED_PADDING, _share(tokens, labels, ignored if isinstance(ignored, int) else -100))


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


class Neighbours(Sensor):
    """Whether inputs that look alike have the same label, over the first few hundred samples.

    Keeps small copies of inputs with their labels; when there are enough, compares each with its nearest.
    """

    produces = (NEIGHBOUR_AGREEMENT,)
    when = first(2 * MAX_BATCHES)
    cost = "copies 64 samples of a batch; one product of 512 by 512 samples, once"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._inputs: list[Tensor] = []
        self._labels: list[Tensor] = []
        self._waiting: Tensor | None = None
        self._batch_size = 0
        self._offered = 0
        self._done = False

    @torch.no_grad()
    def on_pass(self, inputs: PassInputs) -> None:
        """Keep a small copy of the input of a training pass; its labels come with the loss."""
        if not inputs.is_first or self._is_done():
            return
        real, tokens = inputs.real, inputs.tokens
        if real is not None and real.dim() >= 2:
            self._keep_values(real)
        if tokens is not None and tokens.dim() == 2 and tokens.shape[1] >= 2 and not self._is_done():
            self._keep_tokens(tokens)

    def _keep_values(self, values: Tensor) -> None:
        self._offered += 1
        features = values[:PER_BATCH].flatten(1)
        step = -(-features.shape[1] // MAX_FEATURES) if features.shape[1] else 1
        self._waiting = features[:, ::step].float().clone()
        self._batch_size = len(values)

    def _keep_tokens(self, tokens: Tensor) -> None:
        """Keep rows of whole numbers: alike are those with the same words in them, in whatever order."""
        self._offered += 1
        rows = tokens[:PER_BATCH].long()
        words = torch.zeros(len(rows), WORDS, device=rows.device)
        # What most rows end in is padding: that two texts are of one length makes them no more alike.
        counts = (rows != rows[:, -1].mode().values).float()
        self._waiting = words.scatter_add_(1, rows.remainder(WORDS), counts)
        self._batch_size = len(tokens)

    @torch.no_grad()
    def on_loss(self, call: LossCall) -> None:
        """Keep the labels of the input that came last."""
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
        if not self._done and (not self.when(self._offered) or (not self._inputs and self._offered >= MAX_UNFIT)):
            self._finish()
        return self._done

    def _finish(self) -> None:
        if sum(map(len, self._inputs)) >= MIN_SAMPLES:
            self._compare(torch.cat(self._inputs), torch.cat(self._labels))
        self._done = True
        self.finish()
        self._inputs, self._labels, self._waiting = [], [], None

    def _compare(self, inputs: Tensor, labels: Tensor) -> None:
        with torch.autocast(inputs.device.type, enabled=False):
            squares = inputs.square().sum(1)
            sizes = squares[:, None] + squares[None, :]
            distances = sizes - 2 * (inputs @ inputs.T)
        # The same sample in a later epoch has the same label, right or wrong: it says nothing.
        distances = distances.masked_fill(distances <= 1e-5 * sizes, float("inf"))
        closest, nearest = distances.fill_diagonal_(float("inf")).min(1)
        usual = distances.masked_fill(distances.isinf(), float("nan")).nanmedian(1).values
        # Words that are written as one-hot rows are all equally far from each other: none is nearest, none disagrees.
        disagrees = (labels[nearest] != labels) & (closest < NEARER * usual)
        self.signals.see(LOSS, NEIGHBOUR_AGREEMENT, (~disagrees).float())
