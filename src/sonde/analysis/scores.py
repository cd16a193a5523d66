"""The scores of every sample of an evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde import strict_json
from sonde.analysis.evaluations import Evaluation
from sonde.errors import OptionError, RunDamaged
from sonde.store.pages import Datapoint

Column = NDArray[np.float64]

_START: Final = '{"aggregated":'
_START_BYTES: Final = 64 << 10
_LESS_IS_BETTER: Final = ("loss", "error", "perplexity", "distance", "mse", "mae", "rmse", "nll", "cer", "wer")


@dataclass(frozen=True, slots=True, eq=False)
class ScoreTable:
    """The scores of one evaluation: a column for each metric, a row for each sample."""

    evaluation: Evaluation
    ids: list[Datapoint]
    columns: dict[str, Column]
    """By metric; a metric with several values a sample has a column `name[0]`, `name[1]` for each."""
    directions: dict[str, int]
    """1 where more is better, -1 where less is."""
    aggregated: dict[str, float]
    guessed: tuple[str, ...] = ()
    """Metrics without a direction of their own; it was guessed from their names."""
    captures: dict[str, Any] = field(default_factory=dict)
    """What is missing from the captures, as `sonde.training.Scores.captures`; empty if they are complete."""

    def problems_of(self, sample: Datapoint) -> list[str]:
        """Return what is wrong with the captures of a sample."""
        listed, failed, errors = (self.captures.get(name) for name in ("missing", "failed", "errors"))
        errors = errors if isinstance(errors, dict) else {}
        found = []
        if isinstance(listed, list) and sample in listed:
            found.append("The capture of this sample is missing: it could not be taken or written.")
        for name, samples in failed.items() if isinstance(failed, dict) else ():
            if isinstance(samples, list) and sample in samples:
                found.append(
                    f"Debugger {name!r:.80} failed on this sample. Its first error: {errors.get(name, '')!s:.200}"
                )
        return found

    @property
    def missing_captures(self) -> str:
        """What is missing from the captures, in one sentence; empty if they are complete."""
        listed, errors = self.captures.get("missing"), self.captures.get("errors")
        count = f"{len(listed)} samples lack theirs. " if isinstance(listed, list) else ""
        each = [f"{name}: {error}" for name, error in errors.items()] if isinstance(errors, dict) else []
        return f"The captures are not complete. {count}{'; '.join(each)[:400]}".strip() if self.captures else ""

    def column(self, metric: str) -> Column:
        """Return the scores by a metric.

        Raises:
            OptionError: There is no such metric; the message names those there are.

        """
        if metric not in self.columns:
            known = ", ".join(list(self.columns)[:20]) or "none"
            raise OptionError(f"There is no metric {metric!r:.80} in {self.evaluation.folder.name}; there is: {known}.")
        return self.columns[metric]

    def row_of(self, sample: Datapoint) -> int | None:
        """Return which row a sample has."""
        try:
            return self.ids.index(sample)  # a millisecond for 100,000; a dict would take more memory than the scores
        except ValueError:
            return None

    def badness(self, metric: str) -> Column:
        """Return the scores turned so that more is worse; what is NaN is worst of all."""
        return badness(self.column(metric), self.directions[metric])

    def worst_first(self, metric: str) -> NDArray[np.int64]:
        """Return the rows, those with the worst scores first; of equals, the earlier."""
        order: NDArray[np.int64] = np.argsort(-self.badness(metric), kind="stable")
        return order


def badness(scores: Column, direction: int) -> Column:
    """Return scores turned so that more is worse; NaN becomes infinity."""
    turned = -direction * scores
    return np.where(np.isnan(turned), np.inf, turned)


def read_scores(evaluation: Evaluation) -> ScoreTable:
    """Read the scores of an evaluation; a table without columns if it has none yet.

    Raises:
        RunDamaged: The file holds something else.

    """
    path = evaluation.scores_file
    if not path.is_file():
        return ScoreTable(evaluation, [], {}, {}, {})
    try:
        plain = strict_json.read_object(path)
    except OSError as error:
        raise RunDamaged(f"{path} cannot be read: {error}") from None
    per_datapoint, told = _mapping(plain, "per_datapoint", path), _mapping(plain, "directions", path)
    columns: dict[str, Column] = {}
    directions, guessed = {}, []
    for name, values in per_datapoint.items():
        direction = told.get(name)
        if direction not in (1, -1):
            direction = guess_direction(name)
            guessed.append(name)
        for column, content in _columns(name, values, path):
            columns[column], directions[column] = content, direction
    ids = _ids(plain.get("ids"), columns, path)
    aggregated, captures = _flat(_mapping(plain, "aggregated", path)), _mapping(plain, "captures", path)
    return ScoreTable(evaluation, ids, columns, directions, aggregated, tuple(guessed), captures)


def read_aggregated(evaluation: Evaluation) -> dict[str, float]:
    """Read only the scores of the whole evaluation; they stand first, so the rest of a large file is left alone.

    Raises:
        RunDamaged: The file holds something else.

    """
    path = evaluation.scores_file
    try:
        with path.open("rb") as file:
            start = file.read(_START_BYTES).decode("utf-8", "replace")
        if start.startswith(_START):
            found, _ = json.JSONDecoder().raw_decode(start, len(_START))
            if isinstance(found, dict):
                return _flat(found)
    except (ValueError, RecursionError, OSError):
        pass  # longer than that, written by another hand, or damaged: the whole file tells
    return read_scores(evaluation).aggregated


def guess_direction(name: str) -> int:
    """Guess from a metric's name whether more (1) or less (-1) is better."""
    lowered = name.lower()
    return -1 if any(word in lowered for word in _LESS_IS_BETTER) else 1


def _mapping(plain: dict[str, Any], name: str, path: Path) -> dict[str, Any]:
    value = plain.get(name, {})
    if not isinstance(value, dict):
        raise RunDamaged(f"{path}: {name!r} is a {type(value).__name__}, not an object.")
    return value


def _columns(name: str, values: Any, path: Path) -> Iterable[tuple[str, Column]]:
    try:
        numbers = np.array(values, np.float64)  # "nan" and "inf" are read as what they say
    except (ValueError, TypeError):
        raise RunDamaged(f"{path}: the scores {name!r:.80} are not one number, or equally many, a sample.") from None
    if numbers.ndim == 1:
        return [(name, numbers)]
    if numbers.ndim != 2:
        raise RunDamaged(f"{path}: the scores {name!r:.80} have {numbers.ndim} dimensions; 1 or 2 are known.")
    return [(f"{name}[{index}]", np.ascontiguousarray(numbers[:, index])) for index in range(numbers.shape[1])]


def _ids(listed: Any, columns: dict[str, Column], path: Path) -> list[Datapoint]:
    lengths = {len(column) for column in columns.values()}
    if len(lengths) > 1:
        raise RunDamaged(f"{path}: metrics have scores of {sorted(lengths)} samples.")
    size = lengths.pop() if lengths else 0
    if not listed:
        return list(range(size))
    if not isinstance(listed, list) or len(listed) != size or not all(type(each) in (int, str) for each in listed):
        raise RunDamaged(f"{path}: 'ids' does not name each of the {size} samples.")
    return listed


def _flat(aggregated: dict[str, Any]) -> dict[str, float]:
    flat: dict[str, float] = {}
    for name, value in aggregated.items():
        many = value if isinstance(value, list) else [value]
        for index, each in enumerate(many):
            try:
                flat[f"{name}[{index}]" if isinstance(value, list) else name] = float(each)
            except (TypeError, ValueError):
                continue
    return flat
