"""Rules about the learning rate and its schedule."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.core import signals
from sonde.core.facts import CallFacts
from sonde.core.metric_names import better_direction
from sonde.diagnosis.case import Case, NotMeasured, run_length
from sonde.diagnosis.learning import judge
from sonde.diagnosis.outlook import chance_loss, is_failing, is_learning_well, is_near_chance
from sonde.diagnosis.ownership import held
from sonde.diagnosis.rule import Found, Threshold, above, below, fact, rule
from sonde.diagnosis.symptoms import TOO_FAR
from sonde.diagnosis.track import Values
from sonde.diagnosis.weights import Weights, first_weights, last_weights
from sonde.records import Evidence, Severity

PACE_HIGH = Threshold(0.1, "update over weight: a usual step has about a thousandth")
PACE_HIGH_WORSE = Threshold(0.03, "the same where the loss rises above its start")
PACE_STEPS = Threshold(3, "persistence: one long first step is common with Adam")
OVERSHOOT = Threshold(1.5, "highest loss over the first: with random labels or a constant output it does not rise")
JUMP = Threshold(2.0, "highest of the first 20 losses over the first, as a median of three: batches scatter less")
JUMP_FAR = Threshold(10.0, "the same of single losses, where the loss comes back soon")
FEW_LEAPS = Threshold(2, "such steps where the loss has jumped as far later on, and has not come back below its start")
JUMP_SHARE = Threshold(0.05, "share of the losses that are as far above the first: it comes back late")
LONGEST = Threshold(0.3, "update over weight of the longest of the first steps, median of weights: 0.1 is common")
GROWN = Threshold(4.0, "size of the weights over their first size, median: twice is common")
LEFT = Threshold(0.15, "loss over its start that long first steps have left")
LOST_STEPS = Threshold(40, "losses that must be known")
MEMORY = Threshold(1.0, "steps that momentum averages over, over those of the whole run: nothing is forgotten")
USUAL_MOMENTUM = Threshold(0.95, "momentum: recipes have 0.9, one-cycle schedules up to 0.95")
MEMORY_GROWTH = Threshold(1.5, "size of the weights over their first size, median: steps have added up")
_FIRST_LOSSES: Final = 20
_USUAL_SHARE: Final = 0.5
_WINDOW: Final = 3
"""Losses whose median is a level: one odd batch is no jump."""


@rule(
    "lr_too_high",
    needs=["gradient", "parameter", "update", "facts.order", signals.BACKWARDS_ADDED, signals.BACKWARDS_SEEN],
    explains=[*TOO_FAR, "overfitting"],
    fix="Divide the learning rate by 10 (or find one with sonde.checkup), or warm it up.",
    refute="Train 100 steps at a tenth of the rate: if the loss does not fall either, this finding is wrong.",
    since=8,
)
def lr_too_high(case: Case) -> Found | None:
    """The learning rate is too high: steps are long, and the loss does not fall, or jumps in the first steps.

    A loss that has jumped far above its start may fall again, but what the weights began with is lost. A momentum that
    is so high that the run ends before the first gradient is forgotten makes steps that only add up.
    """
    found = case.need_loss()
    if (endless := _never_forgets(case)) is not None:
        return endless
    first = first_weights(case)
    early, late = first.pace(), last_weights(case).pace()
    if not len(early):
        raise NotMeasured("updates")
    leaps, overshoot = _count(early, PACE_HIGH), _overshoot(found[1])
    evidence = _evidence(early, late, overshoot)
    if leaps >= PACE_STEPS and _jumps(found[1], first) and not _tries_steps(case):
        why = f"the first steps raise the loss to {overshoot:.3g} times its first value."
        return _too_long(case, first, evidence, why)
    if (lost := _lost_their_start(case, first)) is not None:
        return lost
    return _too_long_to_learn(case, first, evidence)


def _too_long_to_learn(case: Case, first: Weights, evidence: tuple[Evidence, ...]) -> Found | None:
    """Find long steps in a run that fails, and nothing else that explains it."""
    losses, early, late = case.need_loss()[1], first.pace(), last_weights(case).pace()
    leaps, overshoot = _count(early, PACE_HIGH), _overshoot(losses)
    is_failing_for_sure = is_failing(case) and not (case.learning.state == "flat" and case.learning.may_have_fallen)
    if not is_failing_for_sure and (not is_near_chance(case, 1.0) or _tries_steps(case)):
        return None
    if case.learning.state == "broken" and not _was_failing_before(losses, early):
        return None
    worse = case.learning.state in ("worse", "broken")
    if leaps >= PACE_STEPS or (leaps and case.learning.state == "broken"):
        return _too_long(case, first, evidence)
    if leaps >= FEW_LEAPS and JUMP_FAR <= overshoot < math.inf:  # a budget leaves out some of the first steps
        return _too_long(case, first, evidence, "the loss has jumped, and is as high as it was.")
    if worse and overshoot >= OVERSHOOT:
        fast = max(_count(early, PACE_HIGH_WORSE), _count(late, PACE_HIGH_WORSE))
        if fast >= PACE_STEPS:
            return _too_long(case, first, evidence)
    return None


def _lost_their_start(case: Case, first: Weights) -> Found | None:
    """Find first steps that are as long as the weights, which then are several times as large, and a loss left high.

    What the weights were initialised with is what lets a network learn. Weights that were drawn too small grow, too:
    they count as large as torch's layers draw them.
    """
    learning, last = case.learning, last_weights(case)
    is_known = learning.state in ("flat", "worse", "improving") and learning.initial > 0
    if not is_known or learning.points < LOST_STEPS or first.names != last.names or _tries_steps(case):
        return None
    usual = _usual_sizes(case, first.names)
    sizes, mine = np.maximum(first.sizes, usual), np.isfinite(first.updates).any(axis=0) & ~first.began_at_zero
    if mine.sum() < 2 or not len(last.steps) or learning.recent < LEFT * learning.initial:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        paces = (first.updates / sizes)[:, mine]
        ratios = (last.sizes[-1] / sizes[0])[mine]
    if not np.isfinite(ratios).any():  # the last recorded step read none of them
        return None
    growth = float(np.nanmedian(ratios))
    paces = np.nanmedian(paces[np.isfinite(paces).any(axis=1)], axis=1)
    if paces.max() < LONGEST or _count(paces, PACE_HIGH) < PACE_STEPS or not growth >= GROWN:
        return None
    grown = above("size of the weights over their first size, median", growth, GROWN)
    evidence = (above("update of a weight over its size, highest of the first steps", paces.max(), LONGEST), grown)
    why = (
        f"they are {growth:.2g} times as large in the end: what they were initialised with is lost. The loss is still "
        f"{learning.recent / learning.initial:.2g} of its start."
    )
    return _too_long(case, first, evidence, why)


def _usual_sizes(case: Case, names: tuple[str, ...]) -> Values:
    """Return half of the root mean square with which torch's layers draw weights of these shapes."""
    shapes = {each.name: each.shape for each in case.facts.parameters}
    inputs = [math.prod(shapes[name][1:]) if name in shapes else math.inf for name in names]
    usual: Values = _USUAL_SHARE / np.sqrt(3 * np.maximum(inputs, 1.0))
    return usual


def _never_forgets(case: Case) -> Found | None:
    """Find a momentum that averages over more steps than the whole run has, in weights that have grown."""
    first, last = first_weights(case), last_weights(case)
    if not case.final or first.names != last.names or not len(first.steps):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        growth = last.sizes[-1] / first.sizes[0]
    for optimizer in case.facts.optimizers:
        mine = np.isin(first.names, held(optimizer)) & np.isfinite(growth)
        momentum = max((_momentum(case, optimizer.name, at) for at in range(len(optimizer.groups))), default=0.0)
        steps = 1 / max(1 - momentum, 1e-9)
        grown = float(np.median(growth[mine])) if mine.any() else 0.0
        is_odd = USUAL_MOMENTUM < momentum < 1
        if is_odd and steps >= MEMORY * case.step and grown >= MEMORY_GROWTH:
            return Found(
                severity="warning",
                step=1,
                sites=(optimizer.name,),
                evidence=(
                    above("steps that momentum averages over", steps, MEMORY * case.step),
                    above("size of the weights over their first size, median", grown, MEMORY_GROWTH),
                ),
                cause=f"A momentum of {momentum:g} averages gradients over {steps:.0f} steps, more than the "
                f"{case.step} of the whole run: nothing is forgotten, so steps grow up to {steps:.0f} times as "
                "long as the rate says, and go on after the gradient has turned.",
                fix="Use momentum=0.9, which averages over ten steps.",
                refute="Train with momentum=0.9: if the loss swings as much and ends no lower, this finding is wrong.",
            )
    return None


def _momentum(case: Case, optimizer: str, group: int) -> float:
    """Return the lowest momentum of a group; a schedule may change it."""
    curve = case.scalar(f"{optimizer}.group{group}.momentum")
    return 0.0 if curve is None else float(curve[1].min())


def _was_failing_before(losses: Values, early: Values) -> bool:
    """Return whether the loss was rising before it became NaN: only then can long steps be the reason.

    A loss that became NaN at once, after a step longer than the weights themselves, counts too.
    """
    bad = np.flatnonzero(~np.isfinite(losses))
    before = losses[: bad[0]] if len(bad) else losses
    if len(before) < PACE_STEPS:
        return bool(len(early) and early[:3].max() >= 1)
    return _overshoot(before) >= OVERSHOOT or bool(before[-1] > before[0])


def _jumps(losses: Values, first: Weights) -> bool:
    """Return whether one of the first losses is far above the first, very far or for long.

    Losses of both signs do not measure a distance. A single layer forgets where it began: its loss is convex.
    """
    early = losses[:_FIRST_LOSSES]
    trained = np.isfinite(first.updates).any(axis=0).sum()
    if trained < 2 or len(early) < _WINDOW or not np.isfinite(early).all() or early.min() < 0 or early[0] == 0:
        return False
    if _overshoot(early) >= JUMP_FAR:
        return True
    level = np.median(np.lib.stride_tricks.sliding_window_view(losses, _WINDOW), axis=1)
    late = float((level > OVERSHOOT * losses[0]).mean())
    return bool(level[:_FIRST_LOSSES].max() >= JUMP * losses[0] and late >= JUMP_SHARE)


def _tries_steps(case: Case) -> bool:
    """Return whether an optimizer evaluates the loss at points that it may go back from, as LBFGS and SAM do."""
    for seen in case.vitals(signals.BACKWARDS_SEEN):
        added = case.vital(seen.name, signals.BACKWARDS_ADDED)
        if added is not None and (added.numbers() < seen.numbers().max()).any():
            return True
    return False


def _count(pace: Values, limit: float) -> int:
    return int((pace >= limit).sum())


def _overshoot(losses: Values) -> float:
    """Return the highest loss over the first."""
    finite = losses[np.isfinite(losses)]
    if len(finite) < len(losses):
        return float("inf")
    return float(finite.max() / abs(finite[0])) if len(finite) and finite[0] else 0.0


def _evidence(early: Values, late: Values, overshoot: float) -> tuple[Evidence, ...]:
    return (
        above("update of a weight over its size, highest of the first steps", early.max(), PACE_HIGH_WORSE),
        fact("the same over the last steps, median", float(np.median(late)) if len(late) else float("nan")),
        fact("highest loss over the first", overshoot, "loss:scalar mean"),
    )


def _too_long(
    case: Case, first: Weights, evidence: tuple[Evidence, ...], why: str = "the loss does not fall."
) -> Found:
    rate = case.learning_rate()
    at = "" if rate is None else f" (at a rate of {rate[1].max():.3g})"
    ratios = first.update_ratio
    fastest = np.argsort(-np.nan_to_num(np.nanmax(np.nan_to_num(ratios), axis=0)))[:3]
    return Found(
        severity="critical" if case.learning.state == "broken" else "warning",
        step=int(first.steps[0]),
        sites=("optimizer", *(first.names[index] for index in fastest)),
        evidence=evidence,
        cause=f"The learning rate is too high: steps change weights by a large share of their size{at}, and {why}",
    )


PACE_LOW_STEPS = Threshold(40, "persistence: steps, longer than a short warm-up")
PACE_VERY_LOW = Threshold(1e-5, "update over weight: a weight changes by a tenth in ten thousand steps")
PACE_LOW = Threshold(1e-4, "the same; as a rule of thumb its log10 lies between -4 and -1 in runs that learn")
PACE_SLOW = Threshold(1e-3, "the same where the loss falls, but slowly, at the level of guessing")
PULL_LOW = Threshold(1e-6, "gradient over weight: below, there is no gradient to follow, which is another fault")
NEGLIGIBLE = Threshold(2**-9, "share of its size that the fastest weight can have moved in all: bfloat16 rounds by it")
MOVED = Threshold(
    0.2, "median update over size times the steps, fastest weight: trained weights come several times their size"
)
MOVED_LITTLE = Threshold(0.1, "the same where the loss does not fall for certain")
MOVED_STEPS = Threshold(60, "steps of a run that has ended: a shorter one was a trial")
MOVED_SURELY = Threshold(150, "steps from which these hold in full; in shorter runs, in proportion to their length")
FALLEN = Threshold(0.7, "loss over its start: little has been learnt where the loss of guessing is not known")
STILL_FALLING = Threshold(0.25, "share of the fall of the loss that the second half of the run has brought")
WARM_UP = Threshold(1.05, "rate over that ten steps before: still rising")
RATE_DECAYED = Threshold(0.1, "rate over its highest: lowered by a schedule")


@rule(
    "lr_too_low",
    needs=["gradient", "parameter", "update", "facts.order"],
    fix="Raise the learning rate tenfold until the loss moves; sonde.checkup suggests one.",
    refute="Train 100 steps at 100 times the rate: if the loss does not change either, this finding is wrong.",
    since=PACE_LOW_STEPS,
)
def lr_too_low(case: Case) -> Found | None:
    """The learning rate is too low: weights hardly change, and the loss does not fall."""
    if (waiting := _stays_at_the_start_of_a_warm_up(case)) is not None:
        return waiting
    case.need_loss()
    first, last = first_weights(case), last_weights(case)
    if case.step < PACE_LOW_STEPS or _is_rising(case):
        return None
    if _says_nothing(case):
        # One of several optimizers may stand still while the others move.
        parts = [each.name for each in case.facts.optimizers], [held(each) for each in case.facts.optimizers]
        limit = float(NEGLIGIBLE) / case.step
    else:
        parts, limit = (["optimizer"], [first.names]), _slowest(case)
    for name, mine in zip(*parts, strict=True):
        if (found := _too_short(case, name, first.of(mine), last.of(mine), limit)) is not None:
            return found
    return _hardly_moved(case, first, last)


def _hardly_moved(case: Case, first: Weights, last: Weights) -> Found | None:
    """Find a run that ended with its weights near where they began, and with a loss that was still to be lowered.

    The sum of all updates bounds how far a weight can have come. Weights that are trained from their initial values
    come several times as far as they are large; a model that starts out trained need not, but its loss is low.
    """
    paces = [pace for each in (first, last) if len(pace := each.fastest())]
    if not case.final or case.step < MOVED_STEPS or not paces:
        return None
    moved = max(float(np.median(pace)) for pace in paces) * case.step
    pull, most = _pull(last), float(MOVED if case.learning.falls else MOVED_LITTLE)
    most *= min(1.0, case.step / MOVED_SURELY)
    if not 0 < moved <= most or pull is None or not _was_still_to_be_lowered(case):
        return None
    rate, learning = case.learning_rate(), case.learning
    lowered = 1 - learning.recent / learning.initial
    return Found(
        step=int(last.steps[0]),
        sites=("optimizer",),
        evidence=(
            below("update of the fastest weight over its size, median, times the steps of the run", moved, most),
            pull,
            fact("fall of the loss over its start", lowered, "loss:scalar mean"),
            fact("learning rate", float("nan") if rate is None else float(rate[1].max())),
        ),
        cause=f"The learning rate is too low for this run: its {case.step} steps together move no weight by more than "
        f"about {moved:.1%} of its size, and the loss "
        + ("is still falling slowly." if learning.falls or learning.state == "improving" else "does not fall."),
    )


def _was_still_to_be_lowered(case: Case) -> bool:
    """Return whether the loss is about that of guessing, or has fallen steadily but by little."""
    learning, found = case.learning, case.loss()
    if found is None or learning.initial <= 0 or learning.state not in ("flat", "worse", "improving"):
        return False
    if learning.state != "improving":
        return is_near_chance(case) or chance_loss(case) is None
    return _falls_to_the_end(found[1]) and (is_near_chance(case) or learning.recent >= FALLEN * learning.initial)


def _falls_to_the_end(losses: Values) -> bool:
    """Return whether the second half of a run has done a good part of what the loss has fallen by."""
    fifth = max(1, len(losses) // 5)
    start, end = float(np.median(losses[:fifth])), float(np.median(losses[-fifth:]))
    at = (len(losses) - fifth) // 2
    return start > end and float(np.median(losses[at : at + fifth])) - end >= STILL_FALLING * (start - end)


HELD_SHARE = Threshold(0.01, "rate over the one that the schedule was made for; a warm-up that is meant rises from it")
HELD_STEPS = Threshold(100, "persistence: steps of a whole run at exactly one rate, though its schedule is stepped")


def _stays_at_the_start_of_a_warm_up(case: Case) -> Found | None:
    """Find a rate that a schedule has held at one tiny share of the optimizer's own rate in the whole run."""
    if not case.final or case.step < HELD_STEPS or (case.history.first_step or 1) > 1:
        return None
    stepped = {call.about for call in case.facts.calls("scheduler.step") if call.count >= HELD_STEPS}
    # What was loaded from a checkpoint may be at the end of its schedule.
    begun = {call.about for call in case.facts.calls("optimizer.found")}
    for optimizer in case.facts.optimizers:
        rate = case.learning_rate(optimizer.name)
        initial = optimizer.groups[0].settings.get("initial_lr") if optimizer.groups else None
        if optimizer.name not in stepped - begun or rate is None or not isinstance(initial, int | float):
            continue
        steps, values = rate
        if len(steps) < HELD_STEPS or not 0 < values[0] <= HELD_SHARE * initial or (values != values[0]).any():
            continue
        call = next(call for call in case.facts.calls("scheduler.step") if call.about == optimizer.name)
        return Found(
            exact=True,
            step=int(steps[0]),
            sites=("scheduler", optimizer.name),
            evidence=(
                below("rate over the one given to the optimizer", float(values[0] / initial), HELD_SHARE),
                above("steps at exactly that rate, all of the run", len(steps), HELD_STEPS),
                fact("calls of scheduler.step()", call.count),
            ),
            cause=f"The learning rate of {optimizer.name} is {values[0]:.3g} in every step, {values[0] / initial:.2g} "
            f"of the {initial:.3g} that it was given: {call.data.get('kind')} is stepped{call.place}, and never leaves "
            "the start of its warm-up.",
            fix="Check the progress of the warm-up: step / warmup_steps, not step // warmup_steps, which is 0 until "
            "the end; and a warm-up that is shorter than the run.",
            refute="Print optimizer.param_groups[0]['lr'] in each step: if it changes, this finding is wrong.",
        )
    return None


def _too_short(case: Case, optimizer: str, first: Weights, last: Weights, limit: float) -> Found | None:
    """Find weights none of which moves as fast as the limit, though gradients reach them."""
    rate, pace = case.learning_rate(optimizer), last.fastest()[-int(PACE_LOW_STEPS) :]
    # Where a schedule has lowered the rate, the steps before count.
    if rate is not None and rate[1][-1] < RATE_DECAYED * rate[1].max():
        if rate[0][rate[1].argmax()] not in [*first.steps, *last.steps]:
            return None
        pace = np.concatenate([first.fastest(), last.fastest()])
    if not len(pace) or pace.max() >= limit:
        return None
    alive = _pull(last)
    if alive is None:
        return None
    return Found(
        step=int(last.steps[0]),
        sites=(optimizer,),
        evidence=(
            below("update of a weight over its size, fastest weight, highest of the last steps", pace.max(), limit),
            alive,
            fact("learning rate", float("nan") if rate is None else float(rate[1][-1])),
        ),
        cause="The learning rate is too low: steps hardly change the weights, "
        + ("and the loss does not fall." if case.learning.failed else "all steps of the run no more than rounding."),
    )


def _pull(last: Weights) -> Evidence | None:
    """Return how large the gradient of the last weight is that one reaches; None if there is none to follow."""
    gradients = last.gradient_ratio[-5:]
    reached = np.flatnonzero(np.isfinite(gradients).any(axis=0))
    alive = float(np.nanmax(gradients[:, reached[-1]])) if len(reached) else 0.0
    if alive < PULL_LOW:
        return None
    return fact("gradient of the last weight over its size", alive, f"{last.names[reached[-1]]}:gradient rms")


def _says_nothing(case: Case) -> bool:
    """Return whether a run is over whose loss tells nothing of progress, as that of a policy or of a game."""
    learning = case.learning
    return case.final and (learning.state == "unknown" or (learning.state == "improving" and not learning.falls))


def _slowest(case: Case) -> float:
    """Return the update over weight below which a run as this one is too slow; 0 if it is learning.

    A model that starts out trained hardly changes either, but its loss is far below that of guessing.
    """
    if case.learning.state not in ("flat", "worse"):
        return 0.0
    if chance_loss(case) is None or not is_near_chance(case):
        return float(PACE_VERY_LOW)
    return float(PACE_SLOW if case.learning.falls else PACE_LOW)


def _is_rising(case: Case) -> bool:
    """Return whether the rate is still rising in a warm-up."""
    rate = case.learning_rate()
    return rate is not None and bool(rate[1][-1] > WARM_UP * rate[1][max(0, len(rate[1]) - 11)])


LR_COLLAPSED = Threshold(1e-3, "rate over its highest: below it lie only the last two percent of a cosine")
LR_COLLAPSED_STEPS = Threshold(6, "persistence: steps")
LR_COLLAPSED_SHARE = Threshold(0.4, "share of the run: a schedule that is meant to end low spends less there")
LR_SPENT = Threshold(1e-2, "rate over its highest, where the loss was still falling and is as bad as guessing")
LR_SPENT_SHARE = Threshold(0.3, "share of the run at that rate: steps by ten at a half and three quarters leave less")
LR_USEFUL_STEPS = Threshold(300, "steps until then: a schedule this short was made for epochs, not batches")
SCHEDULE_MOST = Threshold(0.9, "calls of scheduler.step() per step: once per batch")
WARM_UP_STEPS = Threshold(5, "readings of the rate in one rise: with fewer it may be chance")
LR_CUTS = Threshold(3, "persistence: cuts of the rate at equal distances")
_PLATEAU_OF_A_LOSS = (
    "it waits for a number that rises (mode='max') and gets one that falls, such as the loss.",
    "Write mode='min' for a loss; mode='max' is for accuracies and other scores.",
)


@rule(
    "lr_schedule_collapse",
    needs=["facts.program"],
    explains=["lr_too_low"],
    fix="Call scheduler.step() once per epoch, outside the batch loop, or give the schedule its length in steps.",
    refute="Print the learning rate of the last epoch you planned: if it should be this low, this finding is wrong.",
    since=LR_COLLAPSED_STEPS,
)
def lr_schedule_collapse(case: Case) -> Found | None:
    """The schedule is run through early in the training: the rate is almost nothing, or goes up and down."""
    if (found := _counts_batches(case) or _follows_a_score(case)) is not None:
        return found
    names = [optimizer.name for optimizer in case.facts.optimizers] or ["optimizer"]
    rates = [(name, rate) for name in names if (rate := case.learning_rate(name)) is not None]
    if not rates:
        raise NotMeasured("learning rates")
    for name, (steps, values) in rates:
        found = _starts_over(steps, values) or _is_spent(case, name, steps, values)
        if found is not None:
            return found
    return None


def _is_spent(case: Case, optimizer: str, steps: NDArray[np.int64], values: Values) -> Found | None:
    """Find a rate that is almost nothing for much of the run, after few steps."""
    peak = float(values.max())
    if not peak > 0:
        return None
    start, limit, least = _gone(values, LR_COLLAPSED), LR_COLLAPSED, LR_COLLAPSED_SHARE
    if len(values) - start < LR_COLLAPSED_STEPS and is_failing(case):
        start, limit, least = _gone(values, LR_SPENT), LR_SPENT, LR_SPENT_SHARE
        if start < len(values) and not _was_falling(case, int(steps[start])):
            return None
    if len(values) - start < LR_COLLAPSED_STEPS:
        return None
    useful, total = int(steps[start] - steps[0]), int(steps[-1] - steps[0] + 1)
    share = (total - useful) / total
    if share < least or useful > LR_USEFUL_STEPS:
        return None
    why, fix = "it is stepped once per batch, but was made for epochs.", ""
    if case.facts.scheduler is None and not case.facts.calls("scheduler.step"):
        why, fix = "the program itself lowers it again and again.", "Lower it once per epoch, or by less."
    if _waits_for_a_rise(case):
        why, fix = _PLATEAU_OF_A_LOSS
    return Found(
        severity=_severity(case, int(steps[start])),
        step=int(steps[start]),
        sites=("scheduler", optimizer),
        evidence=(
            below("learning rate over its highest", values[-1] / peak, limit, f"{optimizer}.group0.lr:scalar mean"),
            above("share of the run spent at that rate", share, least),
            fact("steps until then", useful),
        ),
        cause=f"The learning rate of {optimizer} has come down to almost nothing after {useful} steps: {why}",
        fix=fix,
    )


def _gone(values: Values, limit: float) -> int:
    """Return from which reading on a rate stays below a share of its peak, after that: a warm-up starts near 0."""
    low = (values <= limit * values.max()) & (np.arange(len(values)) > int(values.argmax()))
    return len(values) - run_length(low)


def _counts_batches(case: Case) -> Found | None:
    """Find a cosine for epochs that is stepped at every batch: it falls and rises again within one epoch."""
    passes = [call.data.get("length") for call in case.facts.calls("loader.pass") if call.data.get("trained")]
    epoch = max((length for length in passes if isinstance(length, int)), default=0)
    for call in case.facts.calls("scheduler.step"):
        length, epochs = call.data.get("length"), call.data.get("epochs")
        often = call.count >= SCHEDULE_MOST * case.step
        if not isinstance(length, int) or call.count <= 2 * length or not often:
            continue
        if length == epochs or 0 < 2 * length <= epoch:
            made = f"as long as the {length} epochs that are planned" if length == epochs else f"{length} calls long"
            return Found(
                severity="warning",
                step=length,
                sites=("scheduler", "optimizer"),
                evidence=(
                    fact("length of the schedule", length),
                    above("calls of scheduler.step()", call.count, 2 * length),
                    *([fact("batches in an epoch", epoch)] if epoch else []),
                    fact("steps", case.step),
                ),
                cause=f"{call.data.get('kind')} is {made}, but is stepped{call.place} at every batch: the rate goes "
                f"down and up again every {2 * length} batches.",
            )
    return None


def _follows_a_score(case: Case) -> Found | None:
    """Find a scheduler that waits for a number to fall and gets one that is named as a score, or the reverse."""
    for call in case.facts.calls("scheduler.step"):
        mode, name = call.data.get("mode"), str(call.data.get("follows") or "")
        # What is called a score may well be a loss.
        right = {1: "max", -1: "min"}.get(better_direction(name), mode) if name.lower() != "score" else mode
        if mode not in ("min", "max") or mode == right or call.count < LR_CUTS:
            continue
        better, worse = ("higher", "lower") if right == "max" else ("lower", "higher")
        return Found(
            severity="warning",
            step=call.steps[0],
            sites=("scheduler", "optimizer"),
            evidence=(fact("calls of scheduler.step()", call.count),),
            cause=f"ReduceLROnPlateau(mode='{mode}') is stepped{call.place} with `{name}`, which is better when it is "
            f"{better}: it lowers the learning rate while the model improves.",
            fix=f"Create it with mode='{right}'.",
            refute=f"If `{name}` is better when it is {worse}, this finding is wrong.",
        )
    return None


def _starts_over(steps: NDArray[np.int64], values: Values) -> Found | None:
    """Find a warm-up that begins again and again: the rate only rises, and falls back to its start in one step."""
    falls = np.flatnonzero(np.diff(values) < 0) + 1
    if len(falls) < LR_CUTS:
        return None
    rises = np.split(values, falls)
    climbs = [rise for rise in rises[:-1] if len(rise) >= WARM_UP_STEPS and rise[-1] > WARM_UP * rise[0]]
    starts = np.array([rise[0] for rise in rises])
    if len(climbs) < len(falls) or not np.allclose(starts, starts[0], rtol=0.01, atol=0.0):
        return None
    each = int(np.median(np.diff(steps[falls])))
    return Found(
        severity="warning",
        step=int(steps[falls[0]]),
        sites=("scheduler", "optimizer"),
        evidence=(
            above("times that the rate fell back to its start in one step", len(falls), LR_CUTS),
            above(
                "highest rate over its start",
                float(values.max() / starts[0]),
                WARM_UP,
                "optimizer.group0.lr:scalar mean",
            ),
        ),
        cause=f"The warm-up begins again every {each} steps: the rate rises to {values.max():.3g}, then falls back to "
        f"{starts[0]:.3g} in one step, and never gets past the warm-up.",
        fix="Compute the rate from the number of all steps so far, not from that of the step within its epoch.",
        refute="Print the learning rate over two epochs: if it goes on rising in the second, this finding is wrong.",
    )


def _severity(case: Case, gone: int) -> Severity:
    scheduler = case.facts.scheduler
    if scheduler is None or scheduler.kind != "ReduceLROnPlateau" or _waits_for_a_rise(case):
        return "warning"
    # This scheduler lowers the rate because the loss does not fall, which has another cause then.
    return "warning" if case.learning.failed or _was_falling(case, gone) else "info"


def _was_falling(case: Case, gone: int) -> bool:
    """Return whether the loss was falling until the rate was gone, and stopped then."""
    found = case.loss()
    if found is None or is_learning_well(case):
        return False
    steps, losses = found
    until = judge(losses[steps <= gone])
    return until.state == "improving" or until.falls


def _waits_for_a_rise(case: Case) -> bool:
    """Return whether a scheduler with mode='max' gets a loss: it cuts the rate at equal distances from the start on."""
    scheduler, rate = case.facts.scheduler, case.learning_rate()
    if scheduler is None or scheduler.settings.get("mode") != "max" or rate is None:
        return False
    cuts = rate[0][1:][rate[1][1:] < rate[1][:-1]]
    if len(cuts) < LR_CUTS or case.learning.state != "improving":
        return False
    distances = np.diff(cuts)
    first = cuts[0] - rate[0][0]
    return bool(distances.max() <= distances.min() + 1 and first <= 2 * distances.min())


SCHEDULER_IDLE_STEPS = Threshold(30, "persistence: steps without a call of the scheduler")
SCHEDULER_EPOCHS = Threshold(3, "epochs: a scheduler that counts epochs should have been called by then")
SCHEDULER_HELD_LOW = Threshold(0.5, "rate over its initial value: held at the start of a warm-up")
SCHEDULER_CALLS = Threshold(3, "persistence: calls, at equal distances where that is asked for")
_PER_STEP: Final = frozenset({"OneCycleLR", "CyclicLR"})


@rule(
    "scheduler_never_called",
    needs=["facts.loader", "facts.program"],
    explains=["lr_too_high", "lr_too_low"],
    exact=True,
    fix="Call scheduler.step() after optimizer.step(), once per batch or per epoch as the schedule requires.",
    refute="Print scheduler.last_epoch at the end of an epoch: if it has risen, this finding is wrong.",
    since=2,
)
def scheduler_never_called(case: Case) -> Found | None:
    """The schedule does not reach the optimizer: the scheduler is never stepped, drives another one, or restarts."""
    found = _drives_another(case) or _drives_one_twice(case) or _writes_to_a_copy(case) or _steps_by_epoch(case)
    found = found or _made_again(case) or _never_stepped(case)
    if found is not None:
        return found
    counter = case.scalar("scheduler.last_epoch")
    if counter is None:
        raise NotMeasured("scheduler.last_epoch")
    steps, counts = counter
    rate = case.learning_rate()
    if counts.max() != counts.min() or (rate is not None and rate[1].max() != rate[1].min()):
        return None
    taken = int(steps[-1] - steps[0] + 1)
    if not _should_have_been_called(case, taken):
        return None
    return Found(
        step=int(steps[0]),
        sites=("scheduler",),
        evidence=(
            fact("calls of scheduler.step() so far", 0, "scheduler.last_epoch:scalar mean"),
            above("optimizer steps", taken, SCHEDULER_IDLE_STEPS),
        ),
        cause="The learning-rate scheduler is never stepped: the rate stays at its initial value.",
    )


def _never_stepped(case: Case) -> Found | None:
    """Find a scheduler of an optimizer that steps, where no scheduler of it was ever stepped."""
    driven = {call.about for call in case.facts.calls("scheduler.step")}
    if _is_first_epoch(case):
        return None
    for call in case.facts.calls("scheduler.idle"):
        rate = case.learning_rate(call.about or "optimizer")
        moves = rate is not None and rate[1].max() != rate[1].min()
        kind = f"({call.data.get('kind')})" if call.data.get("kind") else "that was made for it"
        if call.about and call.about not in driven and case.num_steps >= SCHEDULER_IDLE_STEPS and not moves:
            return Found(
                # Other libraries' schedulers leave the same mark, and may act once an epoch.
                severity="warning" if call.data.get("kind") else "info",
                step=1,
                sites=("scheduler", call.about),
                evidence=(
                    fact("calls of scheduler.step()", 0),
                    above("optimizer steps", case.num_steps, SCHEDULER_IDLE_STEPS),
                ),
                cause=f"The scheduler of {call.about} {kind}{call.place} is never stepped: the rate stays "
                "at its initial value.",
            )
    return None


def _is_first_epoch(case: Case) -> bool:
    """Return whether the only pass over the data of a loader has not come to its end."""
    passes = [call.data for call in case.facts.calls("loader.pass") if call.data.get("trained")]
    lengths = [(each.get("most"), each.get("length")) for each in passes]
    return bool(lengths) and all(
        isinstance(most, int) and isinstance(length, int) and most < length for most, length in lengths
    )


def _drives_another(case: Case) -> Found | None:
    """Find a scheduler that is stepped, whose optimizer never steps, while no other scheduler drives one that does."""
    calls = case.facts.calls("scheduler.step")
    if any(call.data.get("drives") for call in calls):
        return None
    for call in calls:
        if call.count >= SCHEDULER_CALLS and call.steps[-1] >= SCHEDULER_CALLS:
            return Found(
                step=call.steps[0],
                sites=("scheduler", "optimizer"),
                evidence=(
                    above("calls of scheduler.step()", call.count, SCHEDULER_CALLS),
                    below("steps of the optimizer that it was made for", 0, 0),
                ),
                cause=f"The scheduler stepped{call.place} drives an optimizer that never steps; the one that trains "
                "keeps its rate.",
                fix="Make the scheduler after the optimizer it is for, and make it again when the optimizer is made "
                "again; load its state_dict to go on where it was.",
                refute="Print scheduler.optimizer is optimizer: if it is True, this finding is wrong.",
            )
    return None


def _drives_one_twice(case: Case) -> Found | None:
    """Find two schedulers of one kind that are stepped together for one optimizer, while another one has none."""
    calls = [call for call in case.facts.calls("scheduler.step") if call.about and call.count >= SCHEDULER_CALLS]
    left = [each.name for each in case.facts.optimizers if each.name not in {call.about for call in calls}]
    for number, call in enumerate(calls if left else ()):
        for other in calls[number + 1 :]:
            same = all(call.data.get(key) == other.data.get(key) for key in ("kind", "total", "length"))
            if other.about == call.about and same and (call.count, call.steps) == (other.count, other.steps):
                return Found(
                    step=call.steps[0],
                    sites=("scheduler", left[0], call.about),
                    evidence=(
                        above("schedulers stepped together for one optimizer", 2, 2),
                        fact("calls of scheduler.step() of each", call.count),
                        below(f"schedulers of {left[0]}", 0, 0),
                    ),
                    cause=f"Two {call.data.get('kind')} that are stepped together{other.place} drive {call.about}, and "
                    f"none drives {left[0]}: one rate changes twice as fast, the other never.",
                    fix=f"Make one of the two schedulers with {left[0]} instead of {call.about}.",
                    refute="Print id(scheduler.optimizer) of both: if they differ, this finding is wrong.",
                )
    return None


def _writes_to_a_copy(case: Case) -> Found | None:
    """Find a rate that is written into what `optimizer.state_dict()` returned."""
    for call in case.facts.calls("optimizer.state_dict"):
        written, rate, kept = (call.data.get(name) for name in ("written", "rate", "kept"))
        if isinstance(written, int) and written > 1 and isinstance(rate, int | float) and isinstance(kept, int | float):
            return Found(
                step=call.steps[0],
                sites=("optimizer",),
                evidence=(
                    above("times that a rate was written there", written, 2),
                    fact("rate written last", rate),
                    fact("rate of the optimizer", kept),
                ),
                cause=f"The learning rate is written into the result of optimizer.state_dict(){call.place}, which is a "
                f"copy: the optimizer keeps its rate of {kept:g}.",
                fix="Write it into optimizer.param_groups.",
                refute="Print optimizer.param_groups[0]['lr'] at the next step: if it has changed, this is wrong.",
            )
    return None


def _steps_by_epoch(case: Case) -> Found | None:
    """Find a schedule for all batches that is stepped once in as many steps as an epoch has."""
    for call in case.facts.calls("scheduler.step"):
        total, gaps = call.data.get("total") or call.data.get("length"), np.diff(call.steps)
        if not isinstance(total, int) or len(gaps) < SCHEDULER_CALLS - 1:
            continue
        epoch = int(gaps[0])
        # Any other schedule may be for as many epochs; that it is for all batches is no accident.
        fits = call.data.get("kind") in _PER_STEP or total == epoch * int(call.data.get("epochs") or 0)
        if fits and epoch > 1 and (gaps == epoch).all() and total % epoch == 0 and total > epoch:
            return Found(
                step=call.steps[0],
                sites=("scheduler", "optimizer"),
                evidence=(
                    fact("steps that the schedule was made for", total),
                    above("steps between two calls of scheduler.step()", epoch, 2),
                    fact("epochs that the schedule would take", total),
                ),
                cause=f"{call.data.get('kind')} was made for {total} batches ({total // epoch} epochs of {epoch}), but "
                f"is stepped{call.place} once in {epoch}: the rate stays near its start.",
                fix="Call scheduler.step() after every optimizer.step(), inside the loop over batches.",
            )
    return None


def _made_again(case: Case) -> Found | None:
    """Find a scheduler that is made again before it has got anywhere."""
    stepped = sum(call.count for call in case.facts.calls("scheduler.step"))
    for call in case.facts.calls("scheduler.made"):
        rounds = len(set(call.steps))
        if call.about and rounds > SCHEDULER_CALLS and stepped <= call.count and call.steps[-1] > call.steps[0]:
            return Found(
                step=call.steps[0],
                sites=("scheduler",),
                evidence=(
                    above("schedulers made for one optimizer", call.count, SCHEDULER_CALLS),
                    fact("calls of scheduler.step()", stepped),
                ),
                cause=f"A new {call.data.get('kind')} is made{call.place} again and again: each starts the schedule "
                "anew, and the rate never leaves its start.",
                fix="Make the scheduler once, before the loop.",
                refute="Print id(scheduler) where it is stepped: if it is always the same, this finding is wrong.",
            )
    return None


def _should_have_been_called(case: Case, taken: int) -> bool:
    if taken < SCHEDULER_IDLE_STEPS:
        return False
    scheduler, loader = case.facts.scheduler, case.facts.loader
    if (scheduler is not None and scheduler.kind in _PER_STEP) or _is_held_low(case):
        return True
    length = None if loader is None else loader.settings.get("length")
    epochs = sum(event.event_type == "epoch" for event in case.events)
    several = epochs >= SCHEDULER_EPOCHS or (isinstance(length, int) and length > 0 and taken > 2 * length + 1)
    return several or case.final


def _is_held_low(case: Case) -> bool:
    """Return whether the rate is held at the start of a warm-up."""
    rate = case.learning_rate()
    group = next((group for optimizer in case.facts.optimizers for group in optimizer.groups), None)
    initial = None if group is None else group.settings.get("initial_lr")
    return rate is not None and isinstance(initial, float) and rate[1][-1] < SCHEDULER_HELD_LOW * initial


@rule(
    "scheduler_before_optimizer",
    needs=[signals.STATE_STEPS, "facts.program"],
    exact=True,
    fix="Call optimizer.step() first, then scheduler.step().",
    refute="Print scheduler.last_epoch right after the first optimizer.step(): if it is 0, this finding is wrong.",
    since=2,
)
def scheduler_before_optimizer(case: Case) -> Found | None:
    """The scheduler is stepped before the optimizer."""
    for call in case.facts.calls("scheduler.step"):
        # A counter that is not at its start, and an optimizer that has stepped before, were loaded from a checkpoint.
        if call.about and call.steps[0] == 0 and call.count > 1 and call.data.get("counted") == 1:
            return None if _was_loaded(case) else _before_the_optimizer(call)
    counter = case.scalar("scheduler.last_epoch")
    scheduler = case.facts.scheduler
    if counter is None or scheduler is None:
        raise NotMeasured("scheduler.last_epoch")
    steps, counts = counter
    before = scheduler.settings.get("last_epoch")
    # A counter that jumped, or an optimizer that has stepped before, were loaded from a checkpoint.
    if steps[0] != 1 or before != 0 or counts[0] != 1 or _was_loaded(case):
        return None
    return Found(
        step=1,
        sites=("scheduler",),
        evidence=(
            fact("the scheduler's counter when the run began", 0),
            above("the same at the end of the first step", counts[0], 1, "scheduler.last_epoch:scalar mean"),
        ),
        cause="scheduler.step() is called before optimizer.step(): the first value of the schedule is never used.",
    )


def _before_the_optimizer(call: CallFacts) -> Found:
    return Found(
        step=1,
        sites=("scheduler",),
        evidence=(
            fact("steps of the optimizer at the first call of scheduler.step()", 0),
            above("the scheduler's counter after it", 1, 1),
        ),
        cause=f"scheduler.step() is called{call.place} before optimizer.step(): the first value of the schedule is "
        "never used.",
    )


def _was_loaded(case: Case) -> bool:
    """Return whether the state of an optimizer counted steps before the first step of the run."""
    counted = case.vitals(signals.STATE_STEPS)
    return any(int(track.steps[0]) == 1 and track.numbers()[0] > 1 for track in counted)
