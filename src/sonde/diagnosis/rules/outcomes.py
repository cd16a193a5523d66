"""Rules about how a run goes as a whole. Most of them are symptoms that other findings explain."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.diagnosis.case import Case, NotMeasured, run_length
from sonde.diagnosis.dynamics import CERTAIN, FAR_ABOVE, REGULAR
from sonde.diagnosis.learning import judge
from sonde.diagnosis.outlook import (
    chance_loss,
    is_averaged,
    is_better_than_guessing,
    is_near_chance,
    validation_loss,
)
from sonde.diagnosis.rule import Found, Threshold, above, below, fact, rule
from sonde.diagnosis.rules.loading import SPIKE_RATIO, spike_flags
from sonde.diagnosis.seen_loss import seen_losses
from sonde.diagnosis.tape.roles import is_policy_objective
from sonde.diagnosis.track import Values

MOVED_LOOKS = Threshold(20, "readings from the beginning and from the end that are compared")
MOVED_ERRORS = Threshold(4.0, "standard errors between the two: by chance once in ten thousand times")
_REGRESSIONS: Final = ("huber_loss", "l1_loss", "mse_loss", "smooth_l1_loss")


def targets_move(case: Case) -> bool:
    """Return whether the mean or spread of a regression's targets has changed, as for bootstrapped values."""
    try:
        losses = seen_losses(case, *_REGRESSIONS)
    except NotMeasured:
        return False
    looks = int(MOVED_LOOKS)
    targets = [loss.target for loss in losses]
    return any(
        _differ(target.stat(name)[:looks], target.stat(name)[-looks:])
        for target in targets
        if target is not None and len(target) >= 2 * looks
        for name in ("mean", "std")
    )


def _differ(first: Values, last: Values) -> bool:
    error = np.sqrt(first.var(ddof=1) / len(first) + last.var(ddof=1) / len(last))
    return bool(abs(last.mean() - first.mean()) > MOVED_ERRORS * error)


NOT_LEARNING_STEPS = Threshold(100, "losses without progress since the start")
NOISY_LOSS = Threshold(0.3, "uncertainty of the loss over the first: more progress could go unnoticed")
TRAINED = Threshold(0.3, "first loss over that of guessing: the model started out trained")
LEARNT = Threshold(0.02, "a noisy loss must be this share below chance to count as learning")


@rule(
    "not_learning",
    needs=["facts.losses"],
    outcome=True,
    fix=(
        "Run sonde.checkup: can the model overfit one batch? If not, look at the model and the loss; if so, at the "
        "data "
        "and the learning rate."
    ),
    refute="Train longer: if the loss falls later, this finding is wrong.",
    since=NOT_LEARNING_STEPS,
)
def not_learning(case: Case) -> Found | None:
    """The loss has not fallen since the start.

    Some tasks start with a plateau, so it is a warning only when the run is over.
    """
    case.need_loss()
    learning = case.learning
    if learning.state not in ("flat", "worse") or learning.points < NOT_LEARNING_STEPS:
        return None
    chance = chance_loss(case)
    if learning.margin > NOISY_LOSS * abs(learning.initial):
        return None
    if learning.may_have_fallen:
        return None
    if learning.initial == 0 or (chance is not None and learning.initial < TRAINED * chance):
        return None
    if is_better_than_guessing(case, LEARNT) or loss_divergence.find(case) is not None:
        return None
    return Found(
        severity="warning" if case.final and not (targets_move(case) or is_policy_objective(case)) else "info",
        step=1,
        sites=("(loop)",),
        evidence=(
            above("losses without progress", learning.points, NOT_LEARNING_STEPS, "loss:scalar mean"),
            fact("level of the first losses", learning.initial),
            fact("level of the last losses", learning.recent),
        ),
        cause="The model has not learnt anything: the loss has not fallen since the start, and no cause was found.",
    )


STUCK_HALF = Threshold(100, "losses in the later half of a run that do not fall")
STUCK_LEVEL = Threshold(0.95, "loss over that of guessing: nothing useful was learnt")


def is_stuck(case: Case) -> bool:
    """Return whether a run ended about as bad as guessing, and its later half did not fall at all."""
    found = case.loss()
    if not case.final or found is None or not is_near_chance(case, STUCK_LEVEL) or targets_move(case):
        return False
    later = found[1][len(found[1]) // 2 :]
    return len(later) >= STUCK_HALF and judge(later).state == "flat" and not judge(later).falls


PLATEAU_STEPS = Threshold(200, "losses without progress")
PLATEAU_LEVEL = Threshold(0.5, "loss over the first loss: below, most was learnt before")
PLATEAU_PROGRESS = Threshold(0.01, "fall over the first loss within those steps")
PLATEAU_NOISE = Threshold(1 / 3, "fall over the noise of the loss: less is not progress")


@rule(
    "loss_plateau",
    outcome=True,
    severity="info",
    fix="Change the learning rate (both ways), widen the model, or look at the samples with the highest loss.",
    refute="Train twice as long: if the loss falls again, this finding is wrong.",
    since=2 * PLATEAU_STEPS,
)
def loss_plateau(case: Case) -> Found | None:
    """The loss has stopped falling at a high level."""
    found = case.need_loss()
    learning, (steps, losses) = case.learning, found
    wait = int(PLATEAU_STEPS)
    if learning.state != "improving" or len(losses) < 2 * wait or learning.recent < PLATEAU_LEVEL * learning.initial:
        return None
    older, newer = losses[-wait : -wait // 2], losses[-wait // 2 :]
    progress = float(np.median(older) - np.median(newer))
    if progress > max(PLATEAU_PROGRESS * abs(learning.initial), PLATEAU_NOISE * learning.noise):
        return None
    return Found(
        severity="warning" if is_stuck(case) else "info",
        step=int(steps[-wait]),
        sites=("(loop)",),
        evidence=(
            above("losses without progress", wait, PLATEAU_STEPS, "loss:scalar mean"),
            fact("level now over the first", learning.recent / learning.initial),
        ),
        cause="The loss has stopped falling at a high level.",
    )


UNDERFIT = Threshold(0.8, "loss over the first loss at the end")


@rule(
    "underfitting",
    outcome=True,
    severity="info",
    fix="Train longer, raise the learning rate, or widen the model.",
    refute="Compare with the best possible loss: if labels are so noisy that it is near, this finding is wrong.",
    final=True,
)
def underfitting(case: Case) -> Found | None:
    """The run ended after learning only a little."""
    case.need_loss()
    learning = case.learning
    if learning.state != "improving" or learning.points < NOT_LEARNING_STEPS:
        return None
    left = learning.recent / learning.initial if learning.initial > 0 else 0.0
    if left < UNDERFIT:
        return None
    return Found(
        severity="warning" if is_stuck(case) else "info",
        sites=("(loop)",),
        evidence=(
            above("loss over the first loss", left, UNDERFIT, "loss:scalar mean"),
            fact("losses", learning.points),
        ),
        cause="The loss fell only a little: the model is too small, or the training too short or too slow.",
    )


DIVERGED = Threshold(FAR_ABOVE, "loss over its best level")
DIVERGED_STEPS = Threshold(20, "persistence: losses in a row")


@rule(
    "loss_divergence",
    outcome=True,
    fix="Lower the learning rate, clip gradients, and look at the batch at which it started.",
    refute="Continue from a checkpoint before it started: if the loss keeps falling, this finding is wrong.",
    since=10,
)
def loss_divergence(case: Case) -> Found | None:
    """The loss diverges: it has been far above its best level for long.

    A loss that rises beyond its scatter is worth a note. `nan_in_loss` covers losses that are NaN or infinite.
    """
    steps, losses = case.need_loss()
    learning = case.learning
    if learning.state in ("unknown", "broken") or is_policy_objective(case):
        return None
    if any(reading.has_own_targets for reading in case.rounds):
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
        cause="The loss diverges: it is far above its best level.",
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


OSCILLATION = Threshold(0.4, "change from one step to the next over the level of the loss, median")
OSCILLATION_STEPS = Threshold(40, "losses")
OSCILLATION_LEVEL = Threshold(0.2, "loss over the first loss: small losses vary by a large share")
OSCILLATION_TURNS = Threshold(0.5, "share of steps at which a rise turns into a fall or back")
OSCILLATION_FALL = Threshold(0.9, "last losses over those before: it still falls")


@rule(
    "loss_oscillation",
    outcome=True,
    severity="info",
    fix="Lower the learning rate or the momentum, or use larger batches.",
    refute="Average the loss over an epoch: if the averages fall, this finding is wrong.",
    since=OSCILLATION_STEPS,
)
def loss_oscillation(case: Case) -> Found | None:
    """The loss oscillates without falling any further."""
    found = case.need_loss()
    learning, losses = case.learning, found[1][-64:]
    if learning.state in ("unknown", "broken") or len(losses) < OSCILLATION_STEPS:
        return None
    if learning.recent <= OSCILLATION_LEVEL * learning.initial:
        return None
    changes = np.diff(losses)
    level = float(np.median(np.abs(losses)))
    swing = float(np.median(np.abs(changes))) / level if level > 0 else 0.0
    turns = float((np.sign(changes[1:]) != np.sign(changes[:-1])).mean())
    falling = np.median(losses[-20:]) < OSCILLATION_FALL * np.median(losses[:20])
    regular = case.dynamics.state == "oscillating"
    if not regular and (swing < OSCILLATION or turns < OSCILLATION_TURNS or falling):
        return None
    return Found(
        step=int(found[0][-64:][0]),
        sites=("(loop)",),
        evidence=(
            above("regularity of the swings", case.dynamics.regularity, REGULAR, "loss:scalar mean")
            if regular
            else above("change from step to step over the level", swing, OSCILLATION, "loss:scalar mean"),
            fact("level of the last losses over the first", learning.recent / learning.initial),
        ),
        cause="The loss oscillates without falling any further.",
    )


SPIKES_MOST = Threshold(0.05, "share of losses: more spikes are a heavy-tailed loss, not events")
SPIKES_STEPS = Threshold(40, "losses")


@rule(
    "loss_spike",
    outcome=True,
    severity="info",
    fix="Clip gradients to the norm that 90% stay below, and look at the batches of these steps.",
    refute="Repeat the step from a checkpoint: if the loss does not spike, its batch is not the reason.",
    since=SPIKES_STEPS,
)
def loss_spike(case: Case) -> Found | None:
    """The loss spikes at single steps."""
    steps, losses = case.need_loss()
    if case.learning.state in ("unknown", "broken"):
        return None
    spikes = spike_flags(losses)
    spikes[:10] = False
    count = int(spikes.sum())
    if not 1 <= count <= SPIKES_MOST * len(losses):
        return None
    worst = int(np.argmax(np.where(spikes, losses, -np.inf)))
    usual = float(np.median(losses))
    ratio = float(losses[worst]) / usual if usual else math.inf
    return Found(
        step=int(steps[worst]),
        sites=("(loop)",),
        evidence=(
            above("highest of them over the median loss", ratio, SPIKE_RATIO, "loss:scalar mean"),
            fact("spikes", count),
        ),
        cause=f"The loss spikes at {count} of {len(losses)} steps and recovers.",
        data={"steps": steps[spikes][:16].tolist()},
    )


OVERFIT_EVALS = Threshold(3, "persistence: evaluations in a row above the best")
OVERFIT_RISE = Threshold(1.1, "validation loss over its best: more than its scatter")
OVERFIT_LOST = Threshold(0.3, "share of what the validation loss had fallen by that is lost again: worth a warning")
MEMORISED = Threshold(0.01, "training loss over validation loss: the training data is memorised")
NOT_MORE = Threshold(0.5, "validation loss over that of guessing: what was memorised does not generalise")
Steps = NDArray[np.int64]


@rule(
    "overfitting",
    needs=["facts.program"],
    fix="Stop at the best evaluation, add weight decay, dropout or augmentation, or get more data.",
    refute="Evaluate on new samples: if their loss does not rise, this finding is wrong.",
    since=OVERFIT_EVALS + 2,
)
def overfitting(case: Case) -> Found | None:
    """The model overfits: the validation loss rises or stays high while the training loss falls."""
    found = validation_loss(case)
    training = case.loss()
    if found is None or training is None:
        raise NotMeasured("a validation loss")
    if any(reading.has_moving_target for reading in case.rounds):
        return None
    name, steps, values = found
    wait = int(OVERFIT_EVALS)
    best = int(np.argmin(values))
    if len(values) < wait + 2 or not np.isfinite(values).all() or values[best] <= 0:
        return None
    rising = run_length(values > OVERFIT_RISE * values[best])
    if (memorised := _memorised(case, name, steps, values)) is not None:
        return memorised
    if rising < wait or values[-1] <= values[-wait - 1]:
        return None
    at_best = training[1][training[0] <= steps[best]][-10:]
    now = training[1][-10:]
    if not len(at_best) or not np.median(now) < np.median(at_best):
        return None
    ratio = float(values[-1] / values[best])
    gained = max(float(values[0]), case.learning.initial) - float(values[best])
    lost = float(values[-1] - values[best]) / gained if gained > 0 else math.inf
    return Found(
        severity="warning" if lost >= OVERFIT_LOST and not _is_undone(case) else "info",
        step=int(steps[best]),
        sites=("(model)",),
        evidence=(
            above("validation loss over its best", ratio, OVERFIT_RISE, f"{name} mean"),
            above("evaluations in a row above the best", rising, OVERFIT_EVALS),
            fact("rise over the fall before it", lost),
            fact("training loss over that at the best evaluation", float(np.median(now) / np.median(at_best))),
        ),
        cause=f"The model overfits since step {int(steps[best])}: better on training data, worse on validation data.",
    )


def _is_undone(case: Case) -> bool:
    """Return whether the model loaded other weights than its present ones after the last step, as the best ones."""
    loads = case.facts.calls("load_state_dict")
    return any(call.about and not call.data.get("own") and call.steps and call.steps[-1] >= case.step for call in loads)


def _memorised(case: Case, name: str, steps: Steps, values: Values) -> Found | None:
    """Find memorised training data and a validation loss that no longer falls, nearer to guessing than to 0."""
    wait, chance = int(OVERFIT_EVALS), chance_loss(case)
    if chance is None or chance <= 0 or not is_averaged(case) or int(np.argmin(values)) >= len(values) - wait:
        return None
    level = float(np.median(values[-wait:]))
    ratio = case.learning.recent / level
    if not (ratio <= MEMORISED and level >= NOT_MORE * chance):
        return None
    return Found(
        severity="info" if _is_undone(case) else "warning",
        step=int(steps[int(np.argmin(values))]),
        sites=("(model)",),
        evidence=(
            below("training loss over validation loss", ratio, MEMORISED, f"{name} mean"),
            above("validation loss over that of guessing", level / chance, NOT_MORE, f"{name} mean"),
        ),
        cause="The model has memorised its training data: the training loss is almost 0, and the validation loss has "
        "stopped falling far above it.",
        fix="Get more data, or check that all of it is read; add augmentation, dropout or weight decay, or use a "
        "smaller model.",
        refute="Evaluate on new samples: if their loss is near that of training, this finding is wrong.",
    )
