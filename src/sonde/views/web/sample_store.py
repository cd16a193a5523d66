"""Scores and captures for the viewer: read once, kept while they do not change, and never from outside the folders."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, Final, TypeVar

from sonde.analysis.scores import (
    Evaluation,
    Notes,
    ScoreTable,
    find_evaluation,
    find_evaluations,
    read_aggregated,
    read_notes,
    read_scores,
)
from sonde.errors import OptionError, RunNotFound
from sonde.store import DebugOutputs
from sonde.store.layout import CAPTURES, KEPT
from sonde.store.pages import Datapoint
from sonde.views.web.library import OpenRun, is_inside

T = TypeVar("T")

_MOST_TABLES: Final = 24
_MOST_FOLDERS: Final = 64
_MOST_AGGREGATED: Final = 4096
_MOST_BYTES: Final = 48 << 20  # of scores that are read for one answer about many epochs
_FRESH_S: Final = 1.0
_WHOLE_NUMBER: Final = re.compile(r"-?\d{1,18}")


class Kept:
    """Values by key and stamp, the least used forgotten first."""

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        self._values: OrderedDict[Hashable, tuple[Hashable, Any]] = OrderedDict()

    def get(self, key: Hashable, stamp: Hashable, make: Callable[[], T]) -> T:
        """Return what was made for a key with this stamp, or make it."""
        with self._lock:
            known = self._values.get(key)
            if known is not None and known[0] == stamp:
                self._values.move_to_end(key)
                value: T = known[1]
                return value
        made = make()  # outside the lock: others may ask for other things meanwhile
        with self._lock:
            self._values[key] = (stamp, made)
            self._values.move_to_end(key)
            while len(self._values) > self._most:
                self._values.popitem(last=False)
        return made


class SampleStore:
    """Reads the evaluations of runs on behalf of all pages about samples."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._tables, self._notes = Kept(_MOST_TABLES), Kept(_MOST_TABLES)
        self._outputs, self._answers = Kept(_MOST_FOLDERS), Kept(_MOST_FOLDERS)
        self._aggregated = Kept(_MOST_AGGREGATED)
        self._clock = clock

    def evaluations(self, opened: OpenRun) -> list[Evaluation]:
        """Return the evaluations of a run that lie inside the folders which may be shown."""
        return [each for each in find_evaluations(opened.run.path) if _is_safe(each, opened.root)]

    def evaluation(self, opened: OpenRun, name: str = "") -> Evaluation:
        """Return one evaluation; without a name the last that has scores.

        Raises:
            RunNotFound: There is none, or it leads out of the folder.

        """
        found = find_evaluation(opened.run.path, name)
        if not _is_safe(found, opened.root):
            raise RunNotFound(f"{found.name} of {opened.name} is not shown: a link in it leads out of the folder.")
        return found

    def table(self, evaluation: Evaluation) -> ScoreTable:
        """Return the scores of an evaluation."""
        path = evaluation.scores_file
        return self._tables.get(path, stamp_of(path), lambda: read_scores(evaluation))

    def aggregated(self, evaluation: Evaluation) -> dict[str, float]:
        """Return the scores of a whole evaluation."""
        path = evaluation.scores_file
        return self._aggregated.get(path, stamp_of(path), lambda: read_aggregated(evaluation))

    def notes(self, evaluation: Evaluation) -> Notes:
        """Return labels and predictions of samples."""
        folder = evaluation.folder / KEPT
        stamp = (stamp_of(folder), stamp_of(evaluation.scores_file))
        return self._notes.get(folder, stamp, lambda: read_notes(evaluation))

    def outputs(self, evaluation: Evaluation, part: str) -> DebugOutputs | None:
        """Return captures or kept samples; those that are still written are looked at again every second."""
        folder = evaluation.folder / part
        if not folder.is_dir():
            return None
        refuse_links(folder, evaluation.folder)
        is_written = any(folder.rglob("*.journal"))
        stamp = (stamp_of(folder), int(self._clock() / _FRESH_S) if is_written else 0)
        return self._outputs.get(folder, stamp, lambda: DebugOutputs(folder))

    def answer(self, evaluation: Evaluation, key: Hashable, make: Callable[[], T]) -> T:
        """Return what was computed from an evaluation, or compute it; forgotten when its files change."""
        stamps = tuple(
            stamp_of(path) for path in (evaluation.scores_file, evaluation.folder / CAPTURES, evaluation.folder / KEPT)
        )
        return self._answers.get((evaluation.folder, key), stamps, make)


def few_enough(evaluations: list[Evaluation], most: int, always: Callable[[Evaluation], bool]) -> list[Evaluation]:
    """Leave out evaluations, evenly, until their scores can be read at once: by number and by bytes."""
    sizes = [stamp_of(each.scores_file)[1] for each in evaluations]
    if len(evaluations) <= most and sum(sizes) <= _MOST_BYTES:
        return evaluations
    fitting = int(_MOST_BYTES * len(sizes) / max(sum(sizes), 1))
    count = max(2, min(most, fitting))
    last = len(evaluations) - 1
    chosen = {round(at * last / (count - 1)) for at in range(count)}
    return [each for at, each in enumerate(evaluations) if at in chosen or always(each)]


def stamp_of(path: Path) -> tuple[int, int]:
    """Return what changes when a file is written; zeros where there is none."""
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return (status.st_mtime_ns, status.st_size)


def _is_safe(evaluation: Evaluation, root: Path) -> bool:
    parts = (evaluation.folder, evaluation.scores_file, evaluation.folder / CAPTURES, evaluation.folder / KEPT)
    return all(is_inside(part, root) for part in parts)


def refuse_links(folder: Path, inside: Path) -> None:
    """Raise RunNotFound if a link anywhere in `folder` leads out of `inside`."""
    for path in folder.rglob("*"):
        if path.is_symlink() and not is_inside(path, inside):
            raise RunNotFound(f"{folder.name} of {inside.name} is not shown: {path.name} is a link that leads out.")


def sample_text(sample: Datapoint) -> str:
    """Write a sample's id as a link has it: a number as it is, a text that looks like a number in quotes.

    >>> sample_text(5), sample_text("cat"), sample_text("5")
    ('5', 'cat', '"5"')
    """
    if isinstance(sample, int):
        return str(sample)
    return json.dumps(sample) if _WHOLE_NUMBER.fullmatch(sample) or sample.startswith('"') else sample


def sample_from_text(text: str) -> Datapoint:
    """Read a sample's id from a link.

    Raises:
        OptionError: It is none.

    """
    if not text:
        raise OptionError("Name the sample: idx=...")
    if text.startswith('"'):
        try:
            read = json.loads(text)
        except ValueError:
            read = None
        if not isinstance(read, str):
            raise OptionError(f"idx={text!r:.60} is not a sample.")
        return read
    return int(text) if _WHOLE_NUMBER.fullmatch(text) else text
