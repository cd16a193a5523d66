"""Select samples by an expression, and compare the same samples across runs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.analysis.query import Columns, parse
from sonde.analysis.scores import (
    Column,
    Evaluation,
    Notes,
    ScoreTable,
    find_evaluation,
    find_evaluations,
    read_notes,
    read_scores,
)
from sonde.errors import OptionError, RunNotFound
from sonde.store.pages import Datapoint

# --------------------------------------------------------------------------------
# Picking samples of a run by an expression, and describing them as rows.


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
    values |= table.columns  # a metric called `label` wins over the label
    return Columns(values, table.directions, size)


def pick(run: str | Path, expression: str, *, evaluation: str = "") -> list[Picked]:
    """Return the samples of a run that an expression picks, the worst first, epoch by epoch.

    An expression that names `epoch` searches all evaluations; any other searches the named evaluation, by default the
    last one with scores.

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
    """Return which samples are among the worst `percentile` by a metric; NaN always is, the best score never."""
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


# --------------------------------------------------------------------------------
# The same samples in several runs: what all fail at, and the average over repeats.


_REPEAT: Final = re.compile(r"(.+?)[_-](?:run|seed|repeat|rep|fold)[_-]?(\d{1,4})")


@dataclass(frozen=True, slots=True, eq=False)
class CommonFailures:
    """How many of several runs fail at each sample."""

    ids: list[Datapoint]
    failed: NDArray[np.int64]
    """In how many runs a sample is among the failures."""
    scored: NDArray[np.int64]
    """In how many runs it has a score."""
    threshold: float
    """The score from which on a sample counts as failed."""

    def worst_first(self) -> NDArray[np.int64]:
        """Return the rows of samples that fail in any run, the most common failures first."""
        share = self.failed / np.maximum(self.scored, 1)
        order: NDArray[np.int64] = np.lexsort((np.arange(len(self.ids)), -self.failed, -share))
        return order[self.failed[order] > 0]


def common_failures(tables: Sequence[ScoreTable], metric: str, percentile: float) -> CommonFailures:
    """Find the samples at which several runs fail: those among the worst `percentile` of all their scores.

    One threshold serves all runs, so a run that is better all over has fewer failures. NaN always fails.

    Raises:
        OptionError: There is no such metric, or the runs disagree on which way it is better.

    """
    if not 0 < percentile < 100:
        raise OptionError(f"The percentile is {percentile}; it lies between 0 and 100.")
    if len({table.directions.get(metric, 0) for table in tables}) > 1 and all(metric in t.columns for t in tables):
        raise OptionError(f"The runs disagree on whether more or less {metric!r:.80} is better.")
    bad = [table.badness(metric) for table in tables]
    pooled = np.concatenate(bad) if bad else np.empty(0)
    finite = pooled[np.isfinite(pooled)]
    limit = float(np.quantile(finite, 1 - percentile / 100)) if finite.size else math.inf
    lowest = float(finite.min()) if finite.size else math.inf
    rows = _rows(tables)
    failed, scored = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    for table, scores in zip(tables, bad, strict=True):
        where = np.array([rows[sample] for sample in table.ids], np.int64)
        # With most samples equally good, the limit is that best score itself: nothing there has failed.
        failed[where] += (scores >= limit) & (scores > lowest)
        scored[where] += 1
    direction = tables[0].directions[metric] if tables else 1
    return CommonFailures(list(rows), failed, scored, -direction * limit)


def repeats_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Group runs that repeat one experiment: `tuned_run_0` and `tuned_run_1`, or `_seed_`, `_repeat_`, `_fold_`.

    >>> repeats_of(["a_run_0", "a_run_1", "b"])
    {'a': ['a_run_0', 'a_run_1'], 'b': ['b']}
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        match = _REPEAT.fullmatch(name)
        groups.setdefault(match[1] if match else name, []).append(name)
    return groups


def average(tables: Sequence[ScoreTable], metric: str) -> tuple[list[Datapoint], Column, Column]:
    """Average the scores of repeats, sample by sample: ids, means and standard deviations.

    A sample that only some repeats scored is averaged over those. The deviation of a single score is NaN.
    """
    rows = _rows(tables)
    stacked = np.full((len(tables), len(rows)), np.nan)
    for row, table in enumerate(tables):
        stacked[row, [rows[sample] for sample in table.ids]] = table.column(metric)
    counts = (~np.isnan(stacked)).sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.nansum(stacked, 0) / np.where(counts, counts, np.nan)
        squares = np.nansum((stacked - means) ** 2, 0) / np.where(counts > 1, counts - 1, np.nan)
    return list(rows), means, np.sqrt(squares)


def _rows(tables: Sequence[ScoreTable]) -> dict[Datapoint, int]:
    """Return a row for each sample that any of the tables has, in the order in which they come."""
    rows: dict[Datapoint, int] = {}
    for table in tables:
        for sample in table.ids:
            rows.setdefault(sample, len(rows))
    return rows
