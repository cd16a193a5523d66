"""Picking samples of a run by an expression, and describing them as rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.analysis.evaluations import Evaluation, find_evaluation, find_evaluations
from sonde.analysis.notes import Notes, read_notes
from sonde.analysis.query import Columns, parse
from sonde.analysis.scores import ScoreTable, read_scores
from sonde.errors import OptionError, RunNotFound
from sonde.store.pages import Datapoint

NOTED: Final = ("label", "prediction")
EXTRA: Final = ("idx", "epoch", *NOTED)


@dataclass(frozen=True, slots=True)
class Picked:
    """A sample that an expression picked."""

    evaluation: str
    epoch: int | None
    idx: Datapoint
    scores: dict[str, float]
    label: Any = None
    prediction: Any = None


def columns_of(table: ScoreTable, notes: Notes | None = None) -> Columns:
    """Return what an expression may name: metrics, `idx`, `epoch`, and `label` and `prediction` of kept samples."""
    size = len(table.ids)
    ids = np.empty(size, object)
    ids[:] = table.ids
    epoch = table.evaluation.epoch
    values: dict[str, NDArray[Any]] = {
        "idx": ids if any(isinstance(each, str) for each in table.ids) else np.array(table.ids, np.float64),
        "epoch": np.full(size, np.nan if epoch is None else float(epoch)),
    }
    if notes is not None:
        for name, known in zip(NOTED, (notes.labels, notes.predictions), strict=True):
            noted = np.empty(size, object)
            noted[:] = [known.get(each) for each in table.ids]
            values[name] = noted
    values |= table.columns  # a metric called `label` is meant, not the label
    return Columns(values, table.directions, size)


def pick(run: str | Path, expression: str, *, evaluation: str = "") -> list[Picked]:
    """Return the samples of a run that an expression picks, the worst first, epoch by epoch.

    An expression that names `epoch` is asked of all evaluations; any other of the last that has scores, or the one
    that is named.

    Raises:
        OptionError: The expression cannot be read, or names what is not there.
        RunNotFound: The run has no scores of samples.

    """
    query = parse(expression)
    if "epoch" in query.names and not evaluation:
        asked = [each for each in find_evaluations(run) if each.has_scores]
        if not asked:
            raise RunNotFound(f"{run} has no scores of samples.")
    else:
        asked = [find_evaluation(run, evaluation)]
    found: list[Picked] = []
    for each in asked:
        table, notes = read_scores(each), read_notes(each)
        if not table.columns:
            raise RunNotFound(f"{each.folder} has no scores yet.")
        found += describe_rows(table, worst_rows(table, query.select(columns_of(table, notes))), notes)
    return found


def worst_rows(table: ScoreTable, mask: NDArray[np.bool_], metric: str = "") -> NDArray[np.int64]:
    """Return the rows of a mask, those worst by a metric first; by the first metric if none is named."""
    order = table.worst_first(metric or next(iter(table.columns)))
    return order[mask[order]]


def describe_rows(table: ScoreTable, rows: Sequence[int] | NDArray[np.int64], notes: Notes | None) -> list[Picked]:
    """Describe rows of a table."""
    return [
        Picked(
            table.evaluation.name,
            table.evaluation.epoch,
            table.ids[row],
            {name: float(column[row]) for name, column in table.columns.items()},
            notes.labels.get(table.ids[row]) if notes else None,
            notes.predictions.get(table.ids[row]) if notes else None,
        )
        for row in rows
    ]


def failed_mask(table: ScoreTable, metric: str, percentile: float) -> NDArray[np.bool_]:
    """Say which samples are among the worst so many percent by a metric; NaN always is, the best score never."""
    if not 0 < percentile < 100:
        raise OptionError(f"The percentile is {percentile}; it lies between 0 and 100.")
    bad = table.badness(metric)
    finite = bad[np.isfinite(bad)]
    limit = float(np.quantile(finite, 1 - percentile / 100)) if finite.size else np.inf
    lowest = float(finite.min()) if finite.size else np.inf
    return np.asarray(((bad >= limit) & (bad > lowest)) | (bad == np.inf), np.bool_)


def name_of(evaluation: Evaluation) -> str:
    """Return an evaluation in words: `epoch 4`, `test`, `evaluation`."""
    if evaluation.epoch is not None:
        return f"epoch {evaluation.epoch}"
    return "evaluation" if evaluation.name == "eval" else evaluation.name
