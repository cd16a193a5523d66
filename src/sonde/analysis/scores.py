"""Read the evaluations of a run: scores, labels and predictions of every sample."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.core import files
from sonde.core.metric_names import better_direction
from sonde.errors import OptionError, RunDamaged, RunNotFound
from sonde.store import DebugOutputs
from sonde.store.layout import CAPTURES, EVALUATION_SCORES, KEPT, TEST, TEST_SCORES, VALIDATION_SCORES, epoch_of
from sonde.store.pages import Datapoint

# --------------------------------------------------------------------------------
# The evaluations of a run: where their scores and captures lie.
#
# An *evaluation* is a folder that a trainer or evaluator filled: `epoch_4` after an epoch, `test` at the end, or the
# work_dir itself. It holds scores, captures (`debugger/`) and kept samples (`samples/`), each of which may be
# missing.


_SCORES: Final = {"epoch": VALIDATION_SCORES, "test": TEST_SCORES, "eval": EVALUATION_SCORES}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Where the scores and captures of one evaluation lie."""

    name: str
    """What a link calls it: the number of the epoch, `test` or `eval`."""
    folder: Path
    epoch: int | None = None

    @property
    def scores_file(self) -> Path:
        """The file with its scores."""
        return self.folder / _SCORES["epoch" if self.epoch is not None else self.name]

    @property
    def has_scores(self) -> bool:
        """Whether it was scored."""
        return self.scores_file.is_file()

    def has(self, part: str) -> bool:
        """Return whether it holds captures (`debugger`) or samples (`samples`)."""
        return (self.folder / part).is_dir()

    def outputs(self, part: str) -> DebugOutputs | None:
        """Open its captures or samples; None if it has none."""
        return DebugOutputs(self.folder / part) if self.has(part) else None


def find_evaluations(run: str | Path) -> list[Evaluation]:
    """Return the evaluations of a run that hold anything: epochs in order, then the test, then its own."""
    path = Path(run)
    epochs = []
    for child in path.iterdir() if path.is_dir() else ():
        epoch = epoch_of(child.name)
        if epoch is not None and child.is_dir():
            epochs.append(Evaluation(str(epoch), child, epoch))
    found = sorted(epochs, key=lambda each: each.epoch or 0)
    found += [Evaluation("test", path / TEST), Evaluation("eval", path)]
    return [each for each in found if each.has_scores or each.has(CAPTURES) or each.has(KEPT)]


def find_evaluation(run: str | Path, name: str = "") -> Evaluation:
    """Return an evaluation by its name; without one, the last that has scores.

    Raises:
        RunNotFound: There is no such evaluation, or none at all.

    """
    found = find_evaluations(run)
    if not found:
        raise RunNotFound(
            f"{run} has no scores of samples. They come from sonde.training: sonde train, or sonde eval with a metric."
        )
    if not name:
        scored = [each for each in found if each.has_scores]
        return (scored or found)[-1]
    for each in found:
        if each.name == name:
            return each
    raise RunNotFound(f"{run} has no evaluation {name!r:.40}; there is: {', '.join(each.name for each in found)}.")


# --------------------------------------------------------------------------------
# The labels and predictions of samples: of all from the scores, else of those that were kept.


_MOST_NOTED: Final = 5000  # samples whose label and prediction are looked up


@dataclass(frozen=True, slots=True)
class Notes:
    """The label and the prediction of samples, where those are single values."""

    labels: dict[Datapoint, Any]
    predictions: dict[Datapoint, Any]


def read_notes(evaluation: Evaluation, most: int = _MOST_NOTED) -> Notes:
    """Read labels and predictions: of all samples where the scores have them, else of those that were kept."""
    notes = _answers(evaluation)
    if notes.labels:
        return notes
    kept = evaluation.outputs(KEPT)
    for sample in list(kept or ())[:most]:
        try:
            entry, _ = kept.entry(sample)  # type: ignore[union-attr]
            for name, into in (("labels", notes.labels), ("prediction", notes.predictions)):
                if _is_small(entry.outputs.get(name), entry.places):
                    value = as_scalar(kept[sample][name])  # type: ignore[index]
                    if value is not None:
                        into[sample] = value
        except (RunDamaged, OSError):
            continue  # one damaged page hides its samples only
    return notes


def _answers(evaluation: Evaluation) -> Notes:
    """Return what the file of scores says; empty where it does not or cannot be read."""
    try:
        plain = files.read_object(evaluation.scores_file)
    except (OSError, RunDamaged):
        return Notes({}, {})
    ids, answers = plain.get("ids"), plain.get("answers")
    if not isinstance(ids, list) or not isinstance(answers, dict):
        return Notes({}, {})
    found: list[dict[Datapoint, Any]] = []
    for name in ("label", "prediction"):
        listed = answers.get(name)
        pairs = zip(ids, listed, strict=True) if isinstance(listed, list) and len(listed) == len(ids) else ()
        found.append({sample: value for sample, value in pairs if isinstance(value, int | float | str)})
    return Notes(*found)


def _is_small(node: Any, places: Sequence[Any]) -> bool:
    if isinstance(node, dict) and set(node) == {"tensor"}:
        number = node["tensor"]
        return isinstance(number, int) and 0 <= number < len(places) and math.prod(places[number].shape) == 1
    return isinstance(node, int | float | str)


def as_scalar(value: Any) -> Any:
    """Return a single number or text, or None if a value is neither."""
    if isinstance(value, np.ndarray | np.generic) and np.size(value) == 1:
        value = np.asarray(value).reshape(-1)[0].item()
    return value if isinstance(value, int | float | str) else None


# --------------------------------------------------------------------------------
# The scores of every sample of an evaluation.


Column = NDArray[np.float64]

_START: Final = '{"aggregated":'
_START_BYTES: Final = 64 << 10


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
        plain = files.read_object(path)
    except OSError as error:
        raise RunDamaged(f"{path} cannot be read: {error}") from None
    per_datapoint, stated = _mapping(plain, "per_datapoint", path), _mapping(plain, "directions", path)
    columns: dict[str, Column] = {}
    directions, guessed = {}, []
    for name, values in per_datapoint.items():
        direction = stated.get(name)
        if direction not in (1, -1):
            direction = guess_direction(name)
            guessed.append(name)
        for column, content in _columns(name, values, path):
            columns[column], directions[column] = content, direction
    ids = _ids(plain.get("ids"), columns, path)
    aggregated, captures = _flat(_mapping(plain, "aggregated", path)), _mapping(plain, "captures", path)
    return ScoreTable(evaluation, ids, columns, directions, aggregated, tuple(guessed), captures)


def read_aggregated(evaluation: Evaluation) -> dict[str, float]:
    """Read only the scores of the whole evaluation; they come first, so the rest of a large file is not read.

    Raises:
        RunDamaged: The file holds something else.

    """
    path = evaluation.scores_file
    try:
        with files.open_file(path) as file:
            start = file.read(_START_BYTES).decode("utf-8", "replace")
        if start.startswith(_START):
            found, _ = json.JSONDecoder().raw_decode(start, len(_START))
            if isinstance(found, dict):
                return _flat(found)
    except (ValueError, RecursionError, OSError, RunDamaged):
        pass  # longer, written by another program, or damaged: read the whole file
    return read_scores(evaluation).aggregated


def guess_direction(name: str) -> int:
    """Guess from a metric's name whether more (1) or less (-1) is better; more where the name does not say."""
    return better_direction(name) or 1


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
