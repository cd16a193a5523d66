"""Decide how severe an anomaly is: compare the loss with that of guessing, and check whether the run learns."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.core import signals
from sonde.core.facts import LossFacts
from sonde.core.metric_names import is_held_out
from sonde.diagnosis.case import Case
from sonde.diagnosis.learning import RELATIVE, Learning
from sonde.diagnosis.track import Values
from sonde.records import Severity

PATIENCE: Final = 20
"""Losses that must be known before a run can count as failing."""
FAR_WORSE: Final = 1.2
"""Loss over that of guessing from which it is worse for certain."""
WASTED: Final = 0.05
"""Share of a run's losses that may be far above that of guessing."""
GENERALISES: Final = 0.8
"""Share of the fall of the training loss that the validation loss must show, from the same start."""
_SEVERAL: Final = 1.5
"""A sum of two calls or more over one of them; their average is about 1."""
_LAST_EVALUATIONS: Final = 3
_CERTAIN: Final = 4.0
_CLASS_LOSSES: Final = ("cross_entropy", "nll_loss")
_BINARY_LOSSES: Final = ("binary_cross_entropy", "binary_cross_entropy_with_logits")
_SQUARE_LOSSES: Final = ("mse_loss",)


def chance_loss(case: Case) -> float | None:
    """Return the loss of a guess that knows only how frequent the answers are; None if it is not known.

    For classes this is the entropy of the labels, for binary losses at most ln 2, for squared errors the variance of
    the target.
    """
    if case.loss_facts(*_CLASS_LOSSES) is not None:
        entropy = case.vital(signals.LOSS, signals.RUNNING_LABEL_ENTROPY)
        loss = case.loss_facts(*_CLASS_LOSSES)
        # With weights a guess is not that of how frequent labels are, but no worse than one that knows nothing.
        weighted = loss is not None and bool(loss.settings.get("weighted") and loss.classes)
        if entropy is not None and not weighted:
            return float(entropy.numbers()[-1])
        return math.log(loss.classes) if loss is not None and loss.classes and loss.classes > 1 else None
    binary = case.loss_facts(*_BINARY_LOSSES)
    if binary is not None:
        return _binary_chance(case, binary)
    if case.loss_facts(*_SQUARE_LOSSES) is not None:
        spread = case.vital(signals.LOSS, signals.TARGET_SPREAD)
        return None if spread is None else float(spread.numbers().mean())
    return None


def _binary_chance(case: Case, loss: LossFacts) -> float:
    entropy = case.vital(signals.LOSS, signals.RUNNING_LABEL_ENTROPY)
    # In adversarial training the batches of one side are all true and those of the other all false.
    if entropy is None or loss.settings.get("weighted") or len(case.facts.optimizers) > 1:
        return math.log(2)
    return min(math.log(2), float(entropy.numbers()[-1]))


def is_averaged(case: Case) -> bool:
    """Return whether the loss is an average, so that it can be compared with `chance_loss`."""
    loss = case.loss_facts()
    if loss is None or len(case.facts.losses) != 1 or loss.settings.get("reduction", "mean") != "mean":
        return False
    return not case.once("adds up calls", lambda: _adds_up_calls(case))


def _adds_up_calls(case: Case) -> bool:
    """Return whether the loss is a sum of several calls of its function, such as one for each time step."""
    total, one = case.loss(), case.track(f"{signals.LOSS}:output")
    if total is None or one is None or not case.has_site(f"{signals.LOSS}:output#1"):
        return False
    _, of_total, of_one = np.intersect1d(total[0], one.steps, return_indices=True)
    ratios = total[1][of_total] / one.numbers()[of_one]
    return bool(len(ratios) and np.median(ratios) > _SEVERAL)


def is_failing(case: Case) -> bool:
    """Return whether the run fails: its loss has not improved, or is still worse than guessing."""
    learning = case.learning
    if learning.state == "broken":
        return True
    if learning.points < PATIENCE:
        return False
    return (learning.failed and not is_better_than_guessing(case)) or _is_worse_than_guessing(case, learning)


def is_better_than_guessing(case: Case, least: float = RELATIVE) -> bool:
    """Return whether a loss that started near that of guessing has fallen below it, certainly and by a share.

    Where labels are noisy there is little to learn, and the first few losses scatter as widely as what was learnt. The
    loss of guessing is known exactly, so the mean of the later half of the run is compared with that. A start that
    only happens to be low, by no more than losses scatter, is one near guessing.
    """
    learning, chance, found = case.learning, chance_loss(case), case.loss()
    if chance is None or chance <= 0 or found is None or not is_averaged(case):
        return False
    highest = learning.initial + learning.margin
    if highest < 0.9 * chance:
        return False
    later = found[1][len(found[1]) // 2 :]
    if len(later) < PATIENCE or not np.isfinite(later).all():
        return False
    error = float(later.std(ddof=1)) / math.sqrt(len(later))
    below = chance - float(later.mean())
    return learning.recent < highest and below > least * chance and below > _CERTAIN * error


def _is_worse_than_guessing(case: Case, learning: Learning) -> bool:
    """Return whether the loss is above that of guessing, or started above it and has only fallen to it."""
    chance = chance_loss(case)
    if chance is None or chance <= 0 or not is_averaged(case):
        return False
    only_unlearnt = learning.initial > FAR_WORSE * chance and learning.recent >= 0.95 * chance
    return learning.recent > FAR_WORSE * chance or only_unlearnt


def began_badly(case: Case) -> bool:
    """Return whether the first loss was far worse than guessing: something was wrong before the first step."""
    chance, found = chance_loss(case), case.loss()
    if chance is None or chance <= 0 or found is None or not is_averaged(case):
        return False
    return bool(found[1][0] > 3 * chance)


def share_worse_than_guessing(case: Case) -> float:
    """Return the share of a run's losses that are far above that of guessing; 0 where that is not known."""
    chance, found = chance_loss(case), case.loss()
    if chance is None or chance <= 0 or found is None or not is_averaged(case):
        return 0.0
    return float((found[1] > FAR_WORSE * chance).mean())


def wastes_steps(case: Case) -> bool:
    """Return whether much of a run went by before its loss was near that of guessing, as after a bad start."""
    return share_worse_than_guessing(case) >= WASTED


def is_near_chance(case: Case, share: float = 0.9) -> bool:
    """Return whether the loss is known to be about that of guessing, or worse."""
    chance = chance_loss(case)
    if chance is None or chance <= 0 or not is_averaged(case):
        return False
    return case.learning.recent >= share * chance


def is_learning_well(case: Case) -> bool:
    """Return whether the loss has fallen to half of its first value, and not only to that of guessing."""
    learning = case.learning
    fell = learning.state == "improving" and learning.recent <= 0.5 * learning.initial
    return fell and not _is_worse_than_guessing(case, learning)


def validation_loss(case: Case) -> tuple[str, NDArray[np.int64], Values] | None:
    """Return the curve of the loss on validation data and its key: a logged number, or the loss in evaluation mode."""
    for name in case.scalars():
        if "loss" in name.lower() and is_held_out(name):
            curve = case.scalar(name)
            return None if curve is None else (f"{name}:scalar", *curve)
    track = case.track(f"{signals.LOSS}:output@eval")
    return None if track is None else (track.key, track.steps, track.numbers())


def generalises(case: Case) -> bool:
    """Return whether the model does almost as well on validation data as on its training data."""
    found, learning = validation_loss(case), case.learning
    if found is None or learning.state != "improving":
        return False
    level = float(np.median(found[2][-_LAST_EVALUATIONS:]))
    return learning.initial - level >= GENERALISES * (learning.initial - learning.recent) > 0


def anomaly_severity(case: Case) -> Severity:
    """Return how severe a statistical anomaly is: worth a note in a run that learns, else a warning.

    Where no loss is known, nothing shows that the run learns.
    """
    return "warning" if is_failing(case) or case.loss() is None else "info"


def beginning_severity(case: Case) -> Severity:
    """Return how severe an anomaly is that was there before the first step: also by the steps that it has cost."""
    return "warning" if wastes_steps(case) else anomaly_severity(case)
