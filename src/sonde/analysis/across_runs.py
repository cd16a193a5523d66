"""The same samples in several runs: what all fail at, and the average over repeats."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.analysis.scores import Column, ScoreTable
from sonde.errors import OptionError
from sonde.store.pages import Datapoint

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
