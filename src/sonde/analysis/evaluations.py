"""The evaluations of a run: where their scores and captures lie.

An *evaluation* is a folder that a trainer or evaluator filled: `epoch_4` after an epoch, `test` at the end, or the
work_dir itself. It holds scores, captures (`debugger/`) and kept samples (`samples/`), each of which may be missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sonde.errors import RunNotFound
from sonde.store import DebugOutputs
from sonde.store.layout import CAPTURES, EVALUATION_SCORES, KEPT, TEST, TEST_SCORES, VALIDATION_SCORES, epoch_of

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
        """Say whether it holds captures (`debugger`) or samples (`samples`)."""
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
