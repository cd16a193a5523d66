"""Sensors for what models are given: every input, the features of a table, and rows that were seen before."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from sonde.core.signals import BATCH_MARK, COLUMN_OFFSET, COLUMN_SCALE, DISTINCT_ROWS, REPEATED_ROWS, SEEN_ROWS
from sonde.hooks.names import ROOT_NAME
from sonde.parallel.placements import WHOLE, data_of
from sonde.parallel.ranks import is_connected
from sonde.records import Phase
from sonde.schedule import every, first
from sonde.sensors.sensor import Context, PassInputs, Sensor
from sonde.sensors.tensors import MAX_ELEMENTS, is_plain

MAX_CALLS: Final = 4
MAX_MARKS: Final = 4096
"""Rows of training that are remembered: the first ones."""
COUNTED_ROWS: Final = 1024
"""After this many rows the different ones are counted."""
MAX_COLUMNS: Final = 1024
MAX_PASSES: Final = 256
"""Passes of training that are looked at, if batches are small."""
EVALUATIONS: Final = 64
"""Passes of evaluation that are looked at."""
MARKED_BATCHES: Final = 64
"""Passes of training whose batch is marked as a whole."""
MAX_KNOWN: Final = 16
"""Lengths of rows and batches whose factors are kept."""
MARKED_ROWS: Final = 256
"""Rows of a batch that its mark is made of, once the first rows of training are known."""
_EXACT: Final = (1 << 24) - 1
"""The largest whole number up to which float32 is exact."""
_SAME_SIZE: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Any odd numbers will do; this is 2**64 over the golden ratio, as a signed number.
_FACTOR: Final = -7046029254386353131


class Inputs(Sensor):
    """The statistics of every tensor that a model is called with, as `(model):input[0]` and the like."""

    produces = ("input",)
    cost = "one pass over the inputs"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._numbers: dict[tuple[str, Phase, int, str], int] = {}
        models = context.watched.models
        self._held = {name or ROOT_NAME: data_of(model) for name, model in models.items()} if is_connected() else {}

    def on_pass(self, inputs: PassInputs) -> None:
        """Record the inputs of a pass."""
        call = min(inputs.call, MAX_CALLS - 1)
        for part, tensor in inputs.given:
            key = (inputs.model, inputs.phase, call, part)
            site = self._numbers.get(key)
            if site is None:
                site = self._numbers[key] = self.signals.recorder.site(
                    inputs.model,
                    "input",
                    phase=inputs.phase,
                    call=call,
                    part=part,
                    tensor=tensor,
                    held=self._held.get(inputs.model, WHOLE),
                )
            self.signals.recorder.see(site, tensor.detach())


class Columns(Sensor):
    """The scale and offset of each feature of a table. Counts the training passes of a model."""

    produces = (COLUMN_SCALE, COLUMN_OFFSET)
    when = first(3) | every(50)
    cost = "two passes over an input of at most a million numbers"

    @torch.no_grad()
    def on_pass(self, inputs: PassInputs) -> None:
        """Look at the first input of real numbers."""
        values = inputs.real if inputs.is_first else None
        if values is None or values.dim() != 2 or len(values) < 2 or values.numel() > MAX_ELEMENTS:
            return
        if self.is_look(inputs.model):
            wide = values.float()
            self.signals.see(inputs.model, COLUMN_SCALE, wide.std(0))
            self.signals.see(inputs.model, COLUMN_OFFSET, wide.mean(0))


class RowMarks(Sensor):
    """Rows of data that were seen before: rows of training in an evaluation, few rows drawn again and again.

    Every row of the model's first input is marked by a whole number computed from its bits, exactly and in any order,
    so that equal rows have equal marks on every device. Marks stay on their device, and nothing waits for it. Counts
    the training passes of a model.
    """

    produces = (SEEN_ROWS, REPEATED_ROWS, DISTINCT_ROWS, BATCH_MARK)
    when = first(8)
    cost = "one pass over at most 1,024 columns of the first 4,096 rows, then of 256 rows; of evaluation over 64 passes"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._marks: dict[str, list[Tensor]] = {}
        self._count: dict[str, int] = {}
        self._counted: set[str] = set()
        self._passes: dict[str, int] = {}
        self._evaluations = 0
        self._factors: _Factors = {}
        """Numbers of places and what they are multiplied by; of each length once."""

    @torch.no_grad()
    def on_pass(self, inputs: PassInputs) -> None:
        """Mark the rows of the first input; of a large batch the first rows."""
        if not inputs.given or (inputs.phase == "train" and inputs.call):
            return
        model, values = inputs.model, inputs.given[0][1]
        values = values[:MAX_MARKS] if values.dim() else values
        if values.dim() < 2 or len(values) < 2 or not _can_be_marked(values):
            return
        if inputs.phase == "train":
            self._mark_batch(model, self._see_training(model, values), values)
        elif model in self._marks and self._evaluations < EVALUATIONS:
            self._evaluations += 1
            known = torch.cat([each for each in self._marks[model] if each.device == values.device])
            if len(known):
                marks = marks_of(values, self._factors)
                self.signals.see(model, SEEN_ROWS, _are_among(marks, known).float().mean(), phase="eval")

    def on_forgotten(self) -> None:
        """Forget the rows, unless there are some of earlier steps among them."""
        if not self.context.steps:
            for kept in (self._marks, self._count, self._counted, self._passes):
                kept.clear()

    def _mark_batch(self, model: str, marks: Tensor | None, values: Tensor) -> None:
        passes = self._passes[model] = self._passes.get(model, 0) + 1
        if passes <= MARKED_BATCHES:
            first_rows = (marks_of(values[:MARKED_ROWS], self._factors) if marks is None else marks)[:MARKED_ROWS]
            self.signals.see(model, BATCH_MARK, mark_of_batch(first_rows, self._factors))

    def _see_training(self, model: str, values: Tensor) -> Tensor | None:
        count, kept = self._count.get(model, 0), self._marks.setdefault(model, [])
        if count >= MAX_MARKS or len(kept) >= MAX_PASSES:
            return None
        marks = marks_of(values, self._factors)
        kept.append(marks)
        self._count[model] = count + len(marks)
        if self.is_look(model):
            self.signals.see(model, REPEATED_ROWS, 1 - distinct(marks) / len(marks))
        if self._count[model] >= COUNTED_ROWS and model not in self._counted:
            self._counted.add(model)
            here = [each for each in kept if each.device == values.device]
            self.signals.see(model, DISTINCT_ROWS, distinct(torch.cat(here)))
        return marks


_Factors = dict[tuple[int, torch.device], tuple[Tensor, Tensor]]


def _factors(size: int, device: torch.device, known: _Factors) -> tuple[Tensor, Tensor]:
    """Return the numbers of places from 1, and an odd factor for each."""
    found = known.get((size, device))
    if found is None:
        if len(known) >= MAX_KNOWN:  # lengths that do not come back
            known.clear()
        places = torch.arange(1, size + 1, device=device)
        found = known[size, device] = (places, ((places * _FACTOR) ^ (places * places)) | 1)
    return found


def mark_of_batch(marks: Tensor, known: _Factors) -> Tensor:
    """Return one number for rows in their order, small enough to be exact in single precision."""
    places, factors = _factors(len(marks), marks.device, known)
    mixed = (marks + places) * factors
    return ((mixed ^ (mixed >> 31)).sum() & _EXACT).float()


def distinct(marks: Tensor) -> Tensor:
    """Return how many different marks there are."""
    ordered = marks.sort().values
    return 1 + (ordered[1:] != ordered[:-1]).sum()


def _are_among(marks: Tensor, known: Tensor) -> Tensor:
    """Return for each mark whether it is among those known. By sorting: `torch.isin` may wait for the device."""
    ordered = known.sort().values
    at = torch.searchsorted(ordered, marks).clamp(max=len(ordered) - 1)
    return ordered.take(at) == marks


def marks_of(values: Tensor, known: _Factors | None = None) -> Tensor:
    """Return a whole number for each row, the same for the same bits; of long rows evenly chosen columns count."""
    rows = values.detach().reshape(len(values), -1)
    if rows.shape[1] > MAX_COLUMNS:
        rows = rows[:, :: -(-rows.shape[1] // MAX_COLUMNS)]
    # Bits of real numbers are read as a whole number, which is exact where adding the numbers would not be.
    whole = rows.contiguous().view(_SAME_SIZE[rows.element_size()]) if rows.is_floating_point() else rows
    places, factors = _factors(rows.shape[1], rows.device, {} if known is None else known)
    wide = whole.long()
    # Of small numbers in double precision only the upper bits differ.
    mixed = ((wide ^ (wide >> 32)) + places) * factors
    return (mixed ^ (mixed >> 29)).sum(1)


def _can_be_marked(values: Tensor) -> bool:
    return is_plain(values) and not values.is_complex() and values.element_size() in _SAME_SIZE
