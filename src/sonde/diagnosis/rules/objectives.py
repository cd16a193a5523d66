"""Rules about what is minimised: its sign, its scale and its terms."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

import numpy as np

from sonde.core import schema, signals
from sonde.core.facts import LIKELIHOOD
from sonde.core.metric_names import better_direction
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.learning import judge
from sonde.diagnosis.outlook import chance_loss, is_learning_well
from sonde.diagnosis.ownership import need_optimizers
from sonde.diagnosis.rule import Found, Threshold, above, below, fact, rule
from sonde.diagnosis.rules.losses import LOSS_LOOKS
from sonde.diagnosis.seen_loss import SeenLoss, seen_losses
from sonde.diagnosis.symptoms import ANY_STATISTIC, NOT_FINITE, NOT_TRAINED
from sonde.diagnosis.tape.data import variance_as_deviation as find_variance_as_deviation
from sonde.diagnosis.tape.flow import wrongly_accumulated
from sonde.diagnosis.tape.losses import (
    averaged_against_summed,
    constant_term,
    idle_term,
    inverted_ratio,
    lowered_surrogate,
    mixed_reductions,
    outweighing_penalty,
    praised,
    term_as_number,
)
from sonde.diagnosis.tape.noise import scaled_by_variance
from sonde.diagnosis.tape.roles import (
    averaged_first,
    helping_opponent,
    learnt_advantage,
    learnt_choice,
    one_sided_weights,
)
from sonde.diagnosis.tape.signs import drawn_to_targets, maximised, punished_entropy, pushed_away, rewarded_divergence
from sonde.diagnosis.tape.unused import cancelled_term
from sonde.diagnosis.track import Track, Values
from sonde.diagnosis.weights import first_weights
from sonde.records import Evidence

LOSS_ZERO = Threshold(1e-12, "loss: a ratio to less is rounding")


def root_ratios(case: Case) -> Values | None:
    """Return what `backward()` was called on over the loss, for the last steps; None if that is not known.

    1 if it was called on the loss itself, 1/k if the loss was divided by k, -1 if its sign was flipped. It is not known
    where a step has several losses, or a scaler multiplies them.
    """
    root = case.vital(signals.LOOP, signals.ROOT)
    loss = case.track(f"{signals.LOSS}:output")
    if (
        root is None
        or loss is None
        or loss.site.kind == "backward"
        or case.track(f"{signals.LOSS}:output#1") is not None
        or _is_divided_by_hand(case, loss.site.kind)
    ):
        return None
    return _over(root, loss)


def _over(root: Track, loss: Track) -> Values | None:
    steps, at, of = np.intersect1d(root.steps, loss.steps, return_indices=True)
    losses, roots = loss.numbers()[of], root.numbers()[at]
    known = np.isfinite(losses) & np.isfinite(roots) & (np.abs(losses) > LOSS_ZERO)
    return roots[known] / losses[known] if len(steps) and known.any() else None


def _is_divided_by_hand(case: Case, kind: str) -> bool:
    """Return whether the loss is known only by the number that was differentiated, neither a plain mean nor a sum."""
    facts = case.loss_facts(kind)
    if facts is None or facts.settings.get("by_hand") is not True:
        return False
    return facts.settings.get("reduction") not in ("mean", "sum")


def root_ratio(case: Case) -> float | None:
    """Return the median of `root_ratios`."""
    ratios = root_ratios(case)
    return None if ratios is None else float(np.median(ratios))


SCORE_LOST = Threshold(0.3, "share of a score that should rise, lost since the start while the loss did not rise")
STEADY = Threshold(1e-3, "spread of a ratio that is constant but for rounding")
FALLING_BELOW = Threshold(10.0, "a negative loss over the size of the first loss")
FALLING_FASTER = Threshold(2.0, "fall in the later part over the fall in the first: ever faster, without a floor")
FALLING_LOSSES = Threshold(20, "losses: fewer do not show whether the fall gets faster")
# Losses that are 0 at best: minimising their negative seeks the worst.
_NEVER_NEGATIVE = ("cross_entropy", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "nll_loss",
                   "binary_cross_entropy", "binary_cross_entropy_with_logits")  # fmt: skip
_SCORE_FALLS: Final = (
    "The score falls while the loss does not rise: what is differentiated has the wrong sign, or rewards those actions "
    "that did not earn it."
)
_EARNED: Final = re.compile("return|reward", re.IGNORECASE)
"""What a policy earns may fall however well its values are fitted."""


@rule(
    "loss_sign_flipped",
    needs=[signals.ROOT, "facts.losses"],
    explains=[*ANY_STATISTIC],
    severity="critical",
    exact=True,
    fix=(
        "Minimise the loss itself; for a likelihood or a reward minimise its negative. Look for a missing or extra "
        "minus "
        "before .backward()."
    ),
    refute="Take one small step on a batch: if the loss on that batch improves, this finding is wrong.",
    since=LOSS_LOOKS,
)
def loss_sign_flipped(case: Case) -> Found | None:
    """The loss is maximised instead of minimised.

    Not judged with several optimizers: in adversarial training one maximises what another minimises.
    """
    taped = helping_opponent(case) or maximised(case) or rewarded_divergence(case) or lowered_surrogate(case)
    taped = taped or inverted_ratio(case)
    if taped is not None or len(case.facts.optimizers) > 1:
        return taped
    if (taped := praised(case) or punished_entropy(case) or pushed_away(case)) is not None:
        return taped
    ratios = root_ratios(case)
    if ratios is not None and case.loss_facts(*_NEVER_NEGATIVE) is not None and _is_whole(ratios):
        recent = ratios[-3:]
        if len(recent) >= LOSS_LOOKS and bool((recent < 0).all()):
            ratio, series = float(recent.mean()), "(loop):vital.root mean"
            return _wrong_sign(below("what backward() was called on, over the loss", ratio, 0.0, series))
        return None
    if case.loss_facts(LIKELIHOOD) is not None:
        return _wrong_sign(fact("log-probabilities that are minimised", 1))
    fallen = _fallen_score(case)
    if fallen is not None:
        found = _wrong_sign(*fallen, exact=False)
        is_own = case.loss_facts(*_NEVER_NEGATIVE) is None
        return replace(found, severity="warning", cause=_SCORE_FALLS) if is_own else found
    curve = case.loss()
    if curve is None:
        raise NotMeasured("a loss")
    return _falls_without_end(curve[1])


def _is_whole(ratios: Values) -> bool:
    """Return whether a loss is all that is differentiated, times a constant.

    The total of a policy's terms may be negative while the loss within it keeps its sign: then their ratio varies.
    """
    return float(np.ptp(ratios)) <= STEADY * abs(float(np.median(ratios)))


def _fits_targets(case: Case) -> bool:
    """Return whether a loss of torch's falls, or a tape shows that the loss falls as outputs move to their targets.

    Then a logged number that falls too, such as `dice`, is a term of the loss and not a score.
    """
    curve = case.curve(f"{signals.LOSS}:output")
    return drawn_to_targets(case) or (curve is not None and judge(curve[1]).state == "improving")


def _fallen_score(case: Case) -> tuple[Evidence, ...] | None:
    """Return evidence that a logged score, which should rise, has fallen while the loss has not risen."""
    if case.learning.state in ("worse", "broken"):
        return None
    fits = _fits_targets(case)
    for name in case.scalars():
        curve = case.scalar(name) if better_direction(name) > 0 else None
        if curve is None or (fits and not _EARNED.search(name)):
            continue
        values = curve[1]
        start, now = float(values[:3].max()), float(np.median(values[-max(3, len(values) // 5) :]))
        lost = (start - now) / start if start > 0 else 0.0
        if lost >= SCORE_LOST and judge(values).state == "improving":
            return (
                above(f"share of {name} lost since the start", lost, SCORE_LOST, f"{name}:scalar mean"),
                fact(f"{name} of the first steps", start),
                fact(f"{name} now", now),
            )
    return None


def _falls_without_end(losses: Values) -> Found | None:
    """Find a loss that falls below zero ever faster; a likelihood may be negative, but has a floor."""
    losses = losses[np.isfinite(losses)]
    if len(losses) < FALLING_LOSSES:
        return None
    quarter = len(losses) // 4
    ends = np.array([np.median(part) for part in (losses[:3], losses[quarter : 2 * quarter], losses[-quarter:])])
    scale = max(abs(float(ends[0])), 1.0)
    if ends[2] >= -FALLING_BELOW * scale:
        return None
    falls = ends[:-1] - ends[1:]
    if falls[1] < FALLING_FASTER * falls[0] or falls[0] <= 0:
        return None
    evidence = (
        below("loss now", float(ends[2]), -FALLING_BELOW * scale),
        above("fall in the later part over the fall in the first", float(falls[1] / falls[0]), FALLING_FASTER),
        fact("loss at the start", float(ends[0])),
    )
    return _wrong_sign(*evidence, exact=False)


def _wrong_sign(*evidence: Evidence, exact: bool = True) -> Found:
    return Found(
        exact=exact,
        step=1,
        sites=(signals.LOSS,),
        evidence=evidence,
        cause="Training makes the loss worse: what is differentiated has the wrong sign.",
    )


AUX_SHARE = Threshold(10.0, "total over the loss within it, in the first steps: 90 % of it is something else")
AUX_FIRST = Threshold(3, "persistence: first steps that are compared")
AUX_STEPS = Threshold(60, "steps in which the loss could have fallen")
AUX_FALLS = Threshold(1.5, "that ratio at first over now: a constant factor before the loss would not change")
AUX_GUESSING = Threshold(0.95, "loss over that of a guess that ignores the input")


@rule(
    "aux_loss_dominates",
    needs=[signals.ROOT, "facts.losses"],
    explains=["constant_output", "lr_too_high", "vanishing_gradient"],
    fix=(
        "Give the added term (KL, penalty, load balancing) a smaller weight, use the same reduction for both (a mean "
        "and a mean, not a sum), or raise its weight slowly."
    ),
    refute="Train 100 steps without the added term: if the loss does not fall either, this finding is wrong.",
    since=AUX_STEPS,
)
def aux_loss_dominates(case: Case) -> Found | None:
    """An added term dominates the loss.

    The total is many times the loss within it and falls, while that loss stays at the level of a guess.
    """
    if (taped := averaged_against_summed(case)) is not None:
        return replace(taped, exact=True)
    if not is_learning_well(case) and (taped := outweighing_penalty(case)) is not None:
        return taped
    ratios, loss = root_ratios(case), case.curve(f"{signals.LOSS}:output")
    if ratios is None or loss is None:
        raise NotMeasured("what backward() was called on, and a loss function of torch")
    if len(ratios) < 2 * AUX_FIRST or len(loss[1]) < AUX_STEPS:
        return None
    first, now = float(ratios[: int(AUX_FIRST)].min()), float(ratios[-1])
    if first < AUX_SHARE or now > first / AUX_FALLS:
        return None
    learning, chance = judge(loss[1]), chance_loss(case)
    if not learning.failed and (chance is None or learning.recent < AUX_GUESSING * chance):
        return None
    kind = next((each.kind for each in case.facts.losses), "loss")
    return Found(
        step=1,
        sites=(signals.LOSS,),
        evidence=(
            above("what was differentiated over the loss, lowest of the first steps", first, AUX_SHARE),
            fact("the same now", now, "(loop):vital.root mean"),
            fact(f"{kind} of the first steps", learning.initial, f"{signals.LOSS}:output mean"),
            fact(f"{kind} now", learning.recent),
        ),
        cause=f"Most of what is minimised is not the {kind}: at the start the total was {first:.0f} times as large. "
        f"Training has reduced the rest, and the {kind} is no better than a guess that ignores the input.",
    )


@rule(
    "target_not_detached",
    needs=["facts.bootstrapped"],
    explains=[*NOT_TRAINED, "loss_sign_flipped", "target_scale"],
    exact=True,
    fix="Compute the target under torch.no_grad(), or detach() it; a target network is common.",
    refute="If both sides should get gradients, as in residual-gradient methods, this finding is wrong.",
)
def target_not_detached(case: Case) -> Found | None:
    """Gradients flow into the target of the loss, which contains the model's own output."""
    if (taped := learnt_advantage(case) or learnt_choice(case)) is not None:
        return taped
    kind = case.need_facts().bootstrapped
    if not kind:
        return None
    return Found(
        step=1,
        sites=(signals.LOSS, "(loop)"),
        evidence=(fact("sides of the loss that get gradients", 2),),
        cause=f"The target of the loss ({kind}) contains the model's own output, and the gradient flows into it as "
        "well: "
        "instead of the output approaching the target, both meet halfway.",
    )


SUM_UPDATE_RATIO = Threshold(0.03, "step over weight: thirty times the usual thousandth")
SUM_HIGHEST = Threshold(1.1, "highest loss over the first: steps that are too long raise it before it falls")
SUM_DIVIDED = Threshold(0.5, "what backward() was called on over the sum: below, the sum is divided later")


@rule(
    "wrong_loss_reduction",
    needs=[signals.ROOT, "gradient", "parameter", "update", "facts.losses", "facts.order"],
    explains=[*ANY_STATISTIC],
    fix="Use reduction='mean', or divide the learning rate by the batch size.",
    refute="Train with half the batch size: if steps keep their length, this finding is wrong.",
    since=3,
)
def wrong_loss_reduction(case: Case) -> Found | None:
    """The loss is summed over the batch, and steps are too long.

    A sum does no harm where it is divided later, or where the optimizer's step does not grow with the gradient.
    """
    if (taped := mixed_reductions(case) or averaged_first(case)) is not None:
        return replace(taped, exact=True)
    summed = [loss for loss in seen_losses(case) if _is_sum(loss)]
    if not summed or all(optimizer.traits.adaptive for optimizer in need_optimizers(case)):
        return None
    loss = summed[0]
    batch = loss.facts.input_shape[0] if loss.facts is not None and loss.facts.input_shape else 1
    if batch < 2 or _is_divided(case, loss):
        return None
    pace = first_weights(case).pace()
    if not len(pace) or float(np.max(pace[:10])) < SUM_UPDATE_RATIO or _falls_from_its_start(case):
        return None
    output = loss.output
    return Found(
        step=1,
        sites=(signals.LOSS,),
        evidence=(
            above("largest early step over the weights", float(np.max(pace[:10])), SUM_UPDATE_RATIO),
            above("samples that are summed", batch, 2),
            fact("loss at the start", float("nan") if output is None else float(output.numbers()[0])),
        ),
        cause=f"{loss.kind} sums over the {batch} samples of a batch instead of averaging: gradients, and with them "
        f"steps, are {batch} times as large.",
    )


def _falls_from_its_start(case: Case) -> bool:
    """Return whether the loss has fallen far and was never above its start: such steps are none too long."""
    found = case.loss()
    return found is not None and is_learning_well(case) and bool(found[1].max() <= SUM_HIGHEST * found[1][0])


def _is_divided(case: Case, loss: SeenLoss) -> bool:
    """Return whether the total is far below this sum: then the sum is divided, whatever else is added to it."""
    root = case.vital(signals.LOOP, signals.ROOT)
    ratios = None if root is None or loss.output is None else _over(root, loss.output)
    return ratios is not None and float(np.median(ratios)) < SUM_DIVIDED


def _is_sum(loss: SeenLoss) -> bool:
    return loss.facts is not None and loss.facts.settings.get("reduction") == "sum"


@rule(
    "term_without_gradient",
    exact=True,
    explains=[*NOT_TRAINED, *NOT_FINITE, "nan_in_data"],
    fix="Remove .detach(), .item(), torch.no_grad() or torch.tensor(...) from the way of this term to the loss.",
    refute="Print requires_grad of that term: if it is True, this finding is wrong.",
)
def term_without_gradient(case: Case) -> Found | None:
    """A term of the loss has no effect, because its gradient is cut off."""
    case.need_tape()
    return idle_term(case) or term_as_number(case) or cancelled_term(case) or constant_term(case)


ROOT_RATIO = Threshold(0.9, "what backward() was called on over the loss: 1 undivided, 0.5 or less if divided")
ROOT_PASSES = Threshold(3, "passes per step: two may be sharpness-aware training, which does not accumulate")


@rule(
    "accumulation_not_scaled",
    needs=[signals.BACKWARDS, signals.BACKWARDS_ADDED, signals.FORWARDS, signals.ROOT, "facts.losses"],
    explains=[*ANY_STATISTIC],
    exact=True,
    fix="Call (loss / {passes:g}).backward(), or divide the learning rate by {passes:g}.",
    refute=(
        "Compare the gradient norm of a step with that of one pass over the same samples: if they are equal, this "
        "finding is wrong."
    ),
    since=LOSS_LOOKS,
)
def accumulation_not_scaled(case: Case) -> Found | None:
    """Gradients are accumulated without dividing the loss.

    Not judged with several optimizers, a summed loss, or an optimizer that runs a line search.
    """
    optimizers = need_optimizers(case)
    if any(optimizer.traits.searches for optimizer in optimizers):
        return None
    if (taped := wrongly_accumulated(case)) is not None:
        return replace(taped, severity="info") if optimizers[0].traits.adaptive else taped
    backwards = case.need_vital(signals.LOOP, signals.BACKWARDS).last(8)
    forwards = case.need_vital(signals.LOOP, signals.FORWARDS).last(8)
    times = float(np.median(backwards.numbers()))
    same = len(forwards) == len(backwards) and bool((forwards.numbers() == backwards.numbers()).all())
    added = case.vital(optimizers[0].name, signals.BACKWARDS_ADDED)
    if added is not None:
        times = min(times, float(np.median(added.last(8).numbers())))
    if times < 2 or len(backwards) < LOSS_LOOKS or not same or len(optimizers) > 1:
        return None
    ratio = root_ratio(case)
    if ratio is None:
        raise NotMeasured("(loop):vital.root and loss_fn:output")
    loss = case.loss_facts()
    kinds = {each.kind for each in case.facts.losses}
    is_mean = loss is not None and len(kinds) == 1 and loss.settings.get("reduction", "mean") == "mean"
    if not is_mean or abs(ratio) < ROOT_RATIO:
        return None
    harmless = optimizers[0].traits.adaptive or times < ROOT_PASSES
    return Found(
        severity="info" if harmless else "warning",
        step=int(backwards.steps[0]),
        sites=(signals.LOSS,),
        evidence=(
            above("backward passes per step", times, 2, f"{backwards.key} mean"),
            above("what backward() was called on, over the loss", ratio, ROOT_RATIO),
            fact("what it would be if divided", 1 / times),
        ),
        cause=f"Each step sums {times:g} backward passes of the undivided loss: gradients are {times:g} times as "
        "large as "
        "those of one batch of that size." + (" Here the scale of gradients matters little." if harmless else ""),
        values={"passes": times},
    )


UNEQUAL_TARGETS = Threshold(1.5, "most over fewest valid targets among the micro-batches of a step")
UNEQUAL_GRAVE = Threshold(3.0, "the same: a target in one micro-batch weighs three times one in another")
UNEQUAL_STEPS = Threshold(2, "persistence: steps with several micro-batches")


@rule(
    "token_mean_of_means",
    needs=[signals.BACKWARDS, signals.VALID_TARGETS, "facts.losses"],
    exact=True,
    fix=(
        "Compute the loss with reduction='sum' in each micro-batch and divide by the number of targets of the "
        "whole step."
    ),
    refute="Count the targets that are not ignore_index in each micro-batch: if they are equal, this finding is wrong.",
    since=UNEQUAL_STEPS,
)
def token_mean_of_means(case: Case) -> Found | None:
    """Micro-batches weigh the same though they have different numbers of targets."""
    valid = case.need_vital(signals.LOSS, signals.VALID_TARGETS)
    backwards = case.need_vital(signals.LOOP, signals.BACKWARDS)
    loss = case.loss_facts("cross_entropy", "nll_loss")
    if loss is None:
        raise NotMeasured("a loss of classes")
    times = float(np.median(backwards.numbers()))
    if times < 2 or loss.settings.get("reduction", "mean") != "mean" or len(case.facts.optimizers) > 1:
        return None
    rows = valid.rows[(valid.rows[:, schema.COUNT] > 1) & (valid.rows[:, schema.MIN] > 0)]
    if len(rows) < UNEQUAL_STEPS:
        return None
    ratio = float(np.median(rows[:, schema.MAX] / rows[:, schema.MIN]))
    if ratio < UNEQUAL_TARGETS:
        return None
    return Found(
        severity="warning" if ratio >= UNEQUAL_GRAVE else "info",
        step=int(valid.steps[0]),
        sites=(signals.LOSS,),
        evidence=(
            above("most over fewest valid targets of the micro-batches of a step", ratio, UNEQUAL_TARGETS),
            above("backward passes per step", times, 2, f"{backwards.key} mean"),
        ),
        cause=f"Each step averages {times:g} means over different numbers of targets: a target in a small micro-batch "
        f"weighs up to {ratio:.1f} times one in a large one.",
    )


@rule(
    "variance_as_deviation",
    exact=True,
    fix="Scale the noise by torch.exp(0.5 * log_var); in a diffusion by torch.sqrt(1 - alpha_bar), and the data by "
    "torch.sqrt(alpha_bar).",
    refute="Compare the spread of what is drawn with exp(0.5 * log_var): if both agree, this finding is wrong.",
)
def variance_as_deviation(case: Case) -> Found | None:
    """Noise is scaled by a variance instead of its root."""
    case.need_tape()
    return find_variance_as_deviation(case) or scaled_by_variance(case)


@rule(
    "rewards_not_centred",
    explains=[*NOT_TRAINED],
    fix="Subtract a baseline before the rewards are used: rewards = (rewards - rewards.mean()) / (rewards.std() + "
    "1e-8), or returns - values.detach().",
    refute="Print the mean and the deviation of the weights: if the mean is near 0, this finding is wrong.",
)
def rewards_not_centred(case: Case) -> Found | None:
    """The choices of a policy are weighed by rewards that are all of one sign and hardly differ."""
    case.need_tape()
    return one_sided_weights(case)
