"""Rules about how a run goes as a whole. Most of them are symptoms that other findings explain."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde import vitals
from sonde.diagnosis.case import Case, NotMeasured, run_length
from sonde.diagnosis.dynamics import CERTAIN, FAR_ABOVE, REGULAR
from sonde.diagnosis.outlook import chance_loss, is_averaged, is_better_than_guessing
from sonde.diagnosis.rule import Found, Threshold, above, below, fact, rule
from sonde.diagnosis.rules.loading import SPIKE_RATIO, spike_flags
from sonde.diagnosis.seen_loss import seen_losses
from sonde.diagnosis.track import Values

_COMPARED: Final = 20
"""Readings from the beginning and from the end."""


_ERRORS: Final = 4.0
"""Standard errors by which the two must differ: by luck once in ten thousand times."""


_REGRESSIONS: Final = ("huber_loss", "l1_loss", "mse_loss", "smooth_l1_loss")


def targets_move(case: Case) -> bool:
    """Say whether the targets of a regression have another mean or spread than they had at the beginning.

    Those of bootstrapped values, as in Q-learning, have.
    """
    try:
        losses = seen_losses(case, *_REGRESSIONS)
    except NotMeasured:
        return False
    targets = [loss.target for loss in losses]
    return any(
        _differ(target.stat(name)[:_COMPARED], target.stat(name)[-_COMPARED:])
        for target in targets
        if target is not None and len(target) >= 2 * _COMPARED
        for name in ("mean", "std")
    )


def _differ(first: Values, last: Values) -> bool:
    error = np.sqrt(first.var(ddof=1) / len(first) + last.var(ddof=1) / len(last))
    return bool(abs(last.mean() - first.mean()) > _ERRORS * error)


NOT_LEARNING_STEPS = Threshold(100, "losses without progress since the start")
NOISY_LOSS = Threshold(0.3, "of the first loss: where as much could be learnt unnoticed, nothing can be said")
LEARNT = Threshold(0.02, "of the loss of guessing that a noisy loss must lie below it to have learnt, for certain")


@rule(
    "not_learning",
    outcome=True,
    fix=(
        "Run sonde.checkup: can the model learn one batch by heart? If not, look at the model and the loss; if so, "
        "at the data and the learning rate."
    ),
    refute="Train on: if the loss falls later, it was a plateau.",
    since=NOT_LEARNING_STEPS,
)
def not_learning(case: Case) -> Found | None:
    """The loss never fell.

    Find a run whose loss is where it began; some tasks have a plateau, so it is grave only when the run is over.
    """
    if case.loss() is None:
        raise NotMeasured("the loss")
    learning = case.learning
    if learning.state not in ("flat", "worse") or learning.points < NOT_LEARNING_STEPS:
        return None
    chance = chance_loss(case)
    if learning.margin > NOISY_LOSS * abs(learning.initial):
        return None  # even a good part of the loss could have gone without being noticed
    if learning.initial == 0 or (chance is not None and learning.initial < 0.3 * chance):
        return None  # it began well trained
    if is_better_than_guessing(case, LEARNT):
        return None  # there is little to learn, and it was learnt
    if loss_divergence.find(case) is not None:
        return None  # it is not where it began, it has left that behind
    return Found(
        severity="warning" if case.final and not targets_move(case) else "info",
        step=1,
        sites=("(loop)",),
        evidence=(
            above("losses without progress", learning.points, NOT_LEARNING_STEPS, "loss:scalar mean"),
            fact("level of the first losses", learning.initial),
            fact("level of the last losses", learning.recent),
        ),
        cause="The model has not learnt anything: the loss is where it began, and no cause was found.",
    )


PLATEAU_STEPS = Threshold(200, "losses without progress")


@rule(
    "loss_plateau",
    outcome=True,
    severity="info",
    fix="Change the learning rate (both ways), widen the model, or look at the samples with the highest loss.",
    refute="Train twice as long: if it falls again, it was a passing plateau.",
    since=2 * PLATEAU_STEPS,
)
def loss_plateau(case: Case) -> Found | None:
    """The loss has stopped falling early.

    Find a loss that fell at first, not far, and has stood still since.
    """
    found = case.loss()
    if found is None:
        raise NotMeasured("the loss")
    learning, (steps, losses) = case.learning, found
    wait = int(PLATEAU_STEPS)
    if learning.state != "improving" or len(losses) < 2 * wait or learning.recent < 0.5 * learning.initial:
        return None
    older, newer = losses[-wait : -wait // 2], losses[-wait // 2 :]
    progress = float(np.median(older) - np.median(newer))
    if progress > max(0.01 * abs(learning.initial), learning.noise / 3):
        return None
    return Found(
        step=int(steps[-wait]),
        sites=("(loop)",),
        evidence=(
            above("losses without progress", wait, PLATEAU_STEPS, "loss:scalar mean"),
            fact("level now over the first", learning.recent / learning.initial),
        ),
        cause="The loss stands still at a high level.",
    )


UNDERFIT = Threshold(0.8, "of the first loss left at the end")


@rule(
    "underfitting",
    outcome=True,
    severity="info",
    fix="Train longer, raise the learning rate, or widen the model.",
    refute="Compare with the best loss that is possible: labels may be noisy.",
    since=1,
    final=True,
)
def underfitting(case: Case) -> Found | None:
    """The run ended with most of its loss left.

    Find a run that is over and has learnt only a little.
    """
    if case.loss() is None:
        raise NotMeasured("the loss")
    learning = case.learning
    if learning.state != "improving" or learning.points < NOT_LEARNING_STEPS:
        return None
    left = learning.recent / learning.initial if learning.initial > 0 else 0.0
    if left < UNDERFIT:
        return None
    return Found(
        sites=("(loop)",),
        evidence=(
            above("part of the first loss that is left", left, UNDERFIT, "loss:scalar mean"),
            fact("losses", learning.points),
        ),
        cause="The run ended with most of its loss left: the model is too small, the training too short, or too slow.",
    )


DIVERGED = Threshold(FAR_ABOVE, "times the best level reached")
DIVERGED_STEPS = Threshold(20, "losses in a row above it")


@rule(
    "loss_divergence",
    outcome=True,
    fix="Lower the learning rate, clip gradients, and look at the batch at which it began.",
    refute="Go on from a checkpoint before it began: if the loss keeps falling, it was a passing disturbance.",
    since=10,
)
def loss_divergence(case: Case) -> Found | None:
    """The loss gets worse and worse.

    Find a loss that has left its best level for long, or note one that rises for certain; `nan_in_loss` is about one
    that is NaN or infinite.
    """
    found = case.loss()
    if found is None:
        raise NotMeasured("the loss")
    steps, losses = found
    learning = case.learning
    if learning.state in ("unknown", "broken"):
        return None
    best = learning.best
    limit = best + (DIVERGED - 1) * max(abs(best), abs(learning.initial))
    away = run_length(losses > limit)
    if away < DIVERGED_STEPS:
        return _rises(case)
    evidence = (
        above("losses in a row far above the best", away, DIVERGED_STEPS, "loss:scalar mean"),
        fact("best level", best),
        fact("level now", learning.recent),
    )
    return Found(
        step=int(steps[-away]),
        sites=("(loop)",),
        evidence=evidence,
        cause="The loss diverges: it is far above where it has been before.",
    )


def _rises(case: Case) -> Found | None:
    dynamics = case.dynamics
    if dynamics.state != "diverging":
        return None
    return Found(
        severity="info",
        sites=("(loop)",),
        evidence=(
            above("rise of the last third, in standard errors", dynamics.trend, CERTAIN, "loss:scalar mean"),
            fact("best level", dynamics.best),
            fact("level now", dynamics.recent),
        ),
        cause="The loss rises again: it is above its best level, beyond its scatter.",
    )


OSCILLATION = Threshold(0.4, "spread from one step to the next over the level of the loss")


@rule(
    "loss_oscillation",
    outcome=True,
    severity="info",
    fix="Lower the learning rate or the momentum, or use larger batches.",
    refute="Average the loss over an epoch: if the averages fall, the swings are only noise between batches.",
    since=40,
)
def loss_oscillation(case: Case) -> Found | None:
    """The loss swings from step to step.

    Find a loss that does not fall any more and swings by a large part of its level, up and down in turns or regularly.
    """
    found = case.loss()
    if found is None:
        raise NotMeasured("the loss")
    learning, losses = case.learning, found[1][-64:]
    if learning.state in ("unknown", "broken") or len(losses) < 40 or learning.recent <= 0.2 * learning.initial:
        return None
    changes = np.diff(losses)
    level = float(np.median(np.abs(losses)))
    swing = float(np.median(np.abs(changes))) / level if level > 0 else 0.0
    turns = float((np.sign(changes[1:]) != np.sign(changes[:-1])).mean())
    falling = np.median(losses[-20:]) < 0.9 * np.median(losses[:20])
    regular = case.dynamics.state == "oscillating"
    if not regular and (swing < OSCILLATION or turns < 0.5 or falling):
        return None
    return Found(
        step=int(found[0][-64:][0]),
        sites=("(loop)",),
        evidence=(
            above("regularity of the swings", case.dynamics.regularity, REGULAR, "loss:scalar mean")
            if regular
            else above("swing from step to step over the level of the loss", swing, OSCILLATION, "loss:scalar mean"),
            below("level of the last losses over the first", learning.recent / learning.initial, 10),
        ),
        cause="The loss swings up and down without getting better.",
    )


@rule(
    "loss_spike",
    outcome=True,
    severity="info",
    fix="Clip gradients to the norm that nine of ten stay below, and look at the batches of these steps.",
    refute="Repeat the step from a checkpoint: if the leap is gone, the batch is not to blame.",
    since=40,
)
def loss_spike(case: Case) -> Found | None:
    """The loss leaps for a moment.

    Find single losses far above those around them.
    """
    found = case.loss()
    if found is None:
        raise NotMeasured("the loss")
    steps, losses = found
    if case.learning.state in ("unknown", "broken"):
        return None
    spikes = spike_flags(losses)
    spikes[:10] = False
    count = int(spikes.sum())
    if not 1 <= count <= 0.05 * len(losses):  # more of them are the nature of a heavy-tailed loss
        return None
    worst = int(np.argmax(np.where(spikes, losses, -np.inf)))
    ratio = float(losses[worst] / np.median(losses))
    return Found(
        step=int(steps[worst]),
        sites=("(loop)",),
        evidence=(
            above("highest of them over the median loss", ratio, SPIKE_RATIO, "loss:scalar mean"),
            fact("spikes", count),
        ),
        cause=f"The loss leaps at {count} of {len(losses)} steps and comes back.",
        data={"steps": steps[spikes][:16].tolist()},
    )


OVERFIT_EVALS = Threshold(3, "evaluations in a row above the best")
OVERFIT_RISE = Threshold(1.1, "times the best validation loss")
OVERFIT_GRAVE = Threshold(1.5, "times the best validation loss")
BY_HEART = Threshold(0.01, "training loss over validation loss: what is trained on is known by heart")
NOT_MORE = Threshold(0.5, "of the loss of guessing, in validation: what was learnt by heart helps with nothing else")


Steps = NDArray[np.int64]


@rule(
    "overfitting",
    fix="Stop at the best evaluation, add weight decay, dropout or augmentation, or get more data.",
    refute="Evaluate on fresh samples: if they do not get worse, the validation set is too small to tell.",
    since=5,
)
def overfitting(case: Case) -> Found | None:
    """The model learns its training data by heart.

    Find a validation loss that rises while the training loss falls, or stays high while that goes to nothing.
    """
    found = _validation(case)
    training = case.loss()
    if found is None or training is None:
        raise NotMeasured("a validation loss")
    name, steps, values = found
    wait = int(OVERFIT_EVALS)
    best = int(np.argmin(values))
    if len(values) < wait + 2 or not np.isfinite(values).all() or values[best] <= 0:
        return None
    rising = run_length(values > OVERFIT_RISE * values[best])
    if (by_heart := _by_heart(case, name, steps, values)) is not None:
        return by_heart
    if rising < wait or values[-1] <= values[-wait - 1]:
        return None
    at_best = training[1][training[0] <= steps[best]][-10:]
    now = training[1][-10:]
    if not len(at_best) or not np.median(now) < np.median(at_best):
        return None
    ratio = float(values[-1] / values[best])
    return Found(
        severity="warning" if ratio >= OVERFIT_GRAVE else "info",
        step=int(steps[best]),
        sites=("(model)",),
        evidence=(
            above("validation loss over its best", ratio, OVERFIT_RISE, f"{name} mean"),
            above("evaluations in a row above the best", rising, OVERFIT_EVALS),
            fact("training loss over that at the best evaluation", float(np.median(now) / np.median(at_best))),
        ),
        cause=f"The model overfits since step {int(steps[best])}: better on what it trains on, worse on the rest.",
    )


def _by_heart(case: Case, name: str, steps: Steps, values: Values) -> Found | None:
    """Find training data known by heart, and a validation loss that no longer falls, nearer to guessing than to 0."""
    wait, chance = int(OVERFIT_EVALS), chance_loss(case)
    if chance is None or chance <= 0 or not is_averaged(case) or int(np.argmin(values)) >= len(values) - wait:
        return None
    level = float(np.median(values[-wait:]))
    ratio = case.learning.recent / level
    if not (ratio <= BY_HEART and level >= NOT_MORE * chance):
        return None
    return Found(
        severity="warning",
        step=int(steps[int(np.argmin(values))]),
        sites=("(model)",),
        evidence=(
            below("training loss over validation loss", ratio, BY_HEART, f"{name} mean"),
            above("validation loss over that of guessing", level / chance, NOT_MORE, f"{name} mean"),
        ),
        cause="The model knows its training data by heart and little else: the training loss is almost nothing, and "
        "the validation loss has stopped falling far above it.",
        fix="Get more data, or check that all of it is read; add augmentation, dropout or weight decay, or take a "
        "smaller model.",
        refute="Evaluate on fresh samples: a loss near that of training refutes it.",
    )


def _validation(case: Case) -> tuple[str, Steps, Values] | None:
    for name in case.scalars():
        plain = name.lower()
        if "loss" in plain and any(word in plain for word in ("val", "test", "dev", "eval")):
            curve = case.scalar(name)
            return None if curve is None else (f"{name}:scalar", *curve)
    track = case.track(f"{vitals.LOSS}:output@eval")
    return None if track is None else (track.key, track.steps, track.numbers())
