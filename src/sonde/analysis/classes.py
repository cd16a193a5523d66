"""Summarise scores by class: a row per class, the confusion matrix, a histogram, and changes between two runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.analysis.scores import Notes, ScoreTable
from sonde.store.pages import Datapoint

MOST_CLASSES: Final = 60
_BINS: Final = 30


@dataclass(frozen=True, slots=True)
class ClassRow:
    """One class: how many samples have its label, how many were predicted as it, how many of both."""

    label: Any
    count: int
    predicted: int
    correct: int
    mean: float
    """The mean score of the samples with its label; NaN without any."""

    @property
    def recall(self) -> float | None:
        """The share of samples with its label that were predicted as it."""
        return self.correct / self.count if self.count else None

    @property
    def precision(self) -> float | None:
        """The share of samples predicted as it that have its label."""
        return self.correct / self.predicted if self.predicted else None


@dataclass(frozen=True, slots=True, eq=False)
class ClassTable:
    """Classes in order, and how often each label was predicted as each class."""

    rows: list[ClassRow]
    confusion: NDArray[np.int64]
    """A row for each label, a column for each prediction."""
    known: int
    """How many samples have a label and a prediction."""
    of: int


def by_class(table: ScoreTable, notes: Notes, metric: str, mask: NDArray[np.bool_]) -> ClassTable | None:
    """Count samples by label and prediction; None where no sample has both, or there are too many classes."""
    column = table.column(metric)
    chosen = [row for row in np.flatnonzero(mask) if table.ids[row] in notes.labels]
    pairs = [(notes.labels[table.ids[row]], notes.predictions.get(table.ids[row]), column[row]) for row in chosen]
    pairs = [each for each in pairs if each[1] is not None]
    classes = sorted({each for label, prediction, _ in pairs for each in (label, prediction)}, key=_order)
    if not pairs or len(classes) > MOST_CLASSES:
        return None
    place = {each: at for at, each in enumerate(classes)}
    labels, predictions = (np.array([place[pair[side]] for pair in pairs]) for side in (0, 1))
    scores = np.array([pair[2] for pair in pairs])
    confusion = np.zeros((len(classes), len(classes)), np.int64)
    np.add.at(confusion, (labels, predictions), 1)
    rows = [
        ClassRow(
            label=each,
            count=int(confusion[at].sum()),
            predicted=int(confusion[:, at].sum()),
            correct=int(confusion[at, at]),
            mean=float(scores[labels == at].mean()) if (labels == at).any() else float("nan"),
        )
        for at, each in enumerate(classes)
    ]
    return ClassTable(rows, confusion, len(pairs), int(mask.sum()))


def _order(value: Any) -> tuple[bool, Any]:
    return isinstance(value, str), value


@dataclass(frozen=True, slots=True, eq=False)
class Histogram:
    """How many samples score between each two edges: all, and those that the filters select."""

    edges: NDArray[np.float64]
    all: NDArray[np.int64]
    selected: NDArray[np.int64]
    not_finite: int


def histogram(column: NDArray[np.float64], mask: NDArray[np.bool_]) -> Histogram:
    """Count scores in equal steps from the least to the greatest that is finite."""
    finite = np.isfinite(column)
    values = column[finite]
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)
    edges = np.linspace(low, high if high > low else low + 1.0, _BINS + 1)
    counts, chosen = (np.histogram(column[finite & each], edges)[0] for each in (np.ones_like(mask), mask))
    return Histogram(edges, counts, chosen, int((~finite).sum()))


@dataclass(frozen=True, slots=True)
class Change:
    """One sample in two runs."""

    idx: Datapoint
    label: Any
    before: Any
    """What the other run predicts."""
    after: Any
    """What this run predicts."""
    score: float
    other: float
    difference: float


def changes(tables: Sequence[ScoreTable], notes: Sequence[Notes], metric: str) -> list[Change]:
    """Return the samples that two runs share, those whose scores differ most first."""
    mine, theirs = tables
    rows = {sample: row for row, sample in enumerate(theirs.ids)}
    left, right = mine.column(metric), theirs.column(metric)
    found = [
        Change(
            idx=sample,
            label=notes[0].labels.get(sample, notes[1].labels.get(sample)),
            before=notes[1].predictions.get(sample),
            after=notes[0].predictions.get(sample),
            score=float(left[row]),
            other=float(right[rows[sample]]),
            difference=float(left[row] - right[rows[sample]]),
        )
        for row, sample in enumerate(mine.ids)
        if sample in rows
    ]
    return sorted(found, key=lambda each: -np.nan_to_num(abs(each.difference), nan=np.inf))
