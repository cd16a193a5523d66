"""Rules about what is minimised: its sign, its scale and its terms."""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from sonde import schema, vitals
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.learning import judge
from sonde.diagnosis.outlook import chance_loss
from sonde.diagnosis.ownership import need_optimizers
from sonde.diagnosis.rule import Found, Threshold, above, below, fact, rule
from sonde.diagnosis.rules.losses import LOSS_LOOKS
from sonde.diagnosis.seen_loss import SeenLoss, seen_losses
from sonde.diagnosis.symptoms import ANY_STATISTIC, NOT_TRAINED
from sonde.diagnosis.track import Values
from sonde.diagnosis.weights import first_weights
from sonde.facts import LIKELIHOOD
from sonde.records import Evidence


def root_ratios(case: Case) -> Values | None:
    """Return, for the last steps, the number that was differentiated over the loss; None if it cannot be told.

    1 if `backward()` was called on the loss itself, 1/k if it was divided by k, -1 if its sign was turned. Where one
    step has several losses, or a scaler multiplies them, nothing can be said.
    """
    root = case.vital(vitals.LOOP, vitals.ROOT)
    loss = case.track(f"{vitals.LOSS}:output")
    if (
        root is None
        or loss is None
        or loss.site.kind == "backward"
        or case.track(f"{vitals.LOSS}:output#1") is not None
        or _is_divided_by_hand(case, loss.site.kind)
    ):
        return None
    steps, at, of = np.intersect1d(root.steps, loss.steps, return_indices=True)
    losses, roots = loss.numbers()[of], root.numbers()[at]
    known = np.isfinite(losses) & np.isfinite(roots) & (np.abs(losses) > 1e-12)
    return roots[known] / losses[known] if len(steps) and known.any() else None


def _is_divided_by_hand(case: Case, kind: str) -> bool:
    """Say whether the loss is known only by the number that was differentiated, which is not a plain mean or sum."""
    facts = case.loss_facts(kind)
    if facts is None or facts.settings.get("by_hand") is not True:
        return False
    return facts.settings.get("reduction") not in ("mean", "sum")


def root_ratio(case: Case) -> float | None:
    """Return the middle of `root_ratios`."""
    ratios = root_ratios(case)
    return None if ratios is None else float(np.median(ratios))


SCORE_LOST = Threshold(0.3, "of a score that only ever should rise, lost since the start while the loss did not rise")
FALLING_BELOW = Threshold(10.0, "a negative loss many times as large as the loss at the start")


# Losses that are 0 at best: whoever lowers their negative seeks the worst.
_NEVER_NEGATIVE = ("cross_entropy", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "nll_loss",
                   "binary_cross_entropy", "binary_cross_entropy_with_logits")  # fmt: skip


# Numbers that people log because they should rise.
_SCORE: Final = re.compile(
    r"(^|[^a-z])(acc|accuracy|auc|bleu|dice|f1|hits|iou|map|psnr|r2|recall|return|returns|reward|rewards|score|ssim|top1)"
    r"([^a-z]|$)",
    re.IGNORECASE,
)


_NO_SCORE: Final = re.compile("loss|error", re.IGNORECASE)


@rule(
    "loss_sign_flipped",
    needs=[vitals.ROOT, "facts.losses"],
    explains=[*ANY_STATISTIC],
    severity="critical",
    exact=True,
    fix=(
        "Minimise the loss itself; for a likelihood or a reward minimise its negative. Look for a minus that is "
        "missing or one too many before .backward()."
    ),
    refute="Take one small step on a batch: if the loss on that batch gets better, the sign is right.",
    since=2,
)
def loss_sign_flipped(case: Case) -> Found | None:
    """The loss is made larger instead of smaller.

    Find backward passes of a negative loss, or a loss that falls without end.

    In a game of several optimizers one of them raises what another lowers.
    """
    if len(case.facts.optimizers) > 1:
        return None
    ratios = root_ratios(case)
    if ratios is not None and case.loss_facts(*_NEVER_NEGATIVE) is not None:
        recent = ratios[-3:]
        if len(recent) >= LOSS_LOOKS and bool((recent < 0).all()):
            turned = below(
                "what backward() was called on, over the loss", float(recent.mean()), 0.0, "(loop):vital.root mean"
            )
            return _wrong_sign(turned)
        return None
    if case.loss_facts(LIKELIHOOD) is not None:
        return _wrong_sign(fact("log-probabilities that are made small, not large", 1))
    fallen = _fallen_score(case)
    if fallen is not None:
        return _wrong_sign(*fallen)
    curve = case.loss()
    if curve is None:
        raise NotMeasured("a loss")
    return _falls_without_end(case, curve[1])


def _fallen_score(case: Case) -> tuple[Evidence, ...] | None:
    """Return what shows that a logged score has fallen far below its start while the loss has not risen.

    Such a number should rise; then what is made small is not what is wanted small.
    """
    if case.learning.state in ("worse", "broken"):
        return None
    for name in case.scalars():
        curve = case.scalar(name) if _SCORE.search(name) and not _NO_SCORE.search(name) else None
        if curve is None:
            continue
        values = curve[1]
        start, now = float(values[:3].max()), float(np.median(values[-max(3, len(values) // 5) :]))
        lost = (start - now) / start if start > 0 else 0.0
        # It falls as a good loss does.
        if lost >= SCORE_LOST and judge(values).state == "improving":
            return (
                above(f"share of {name} lost since the start", lost, SCORE_LOST, f"{name}:scalar mean"),
                fact(f"{name} of the first steps", start),
                fact(f"{name} now", now),
            )
    return None


def _falls_without_end(case: Case, losses: Values) -> Found | None:
    """Tell a loss that runs away below zero, ever faster, from one that may be negative, as a likelihood is."""
    losses = losses[np.isfinite(losses)]
    if len(losses) < 20:
        return None
    quarter = len(losses) // 4
    ends = np.array([np.median(part) for part in (losses[:3], losses[quarter : 2 * quarter], losses[-quarter:])])
    scale = max(abs(float(ends[0])), 1.0)
    if ends[2] >= -FALLING_BELOW * scale:
        return None
    falls = ends[:-1] - ends[1:]
    if falls[1] < 2 * falls[0] or falls[0] <= 0:
        return None
    evidence = (
        below("loss now", float(ends[2]), -FALLING_BELOW * scale),
        above("fall of late over the fall at first", float(falls[1] / falls[0]), 2.0),
        fact("loss at the start", float(ends[0])),
    )
    return _wrong_sign(*evidence)


def _wrong_sign(*evidence: Evidence) -> Found:
    return Found(
        step=1,
        sites=(vitals.LOSS,),
        evidence=evidence,
        cause="Training makes the loss worse on purpose: what is differentiated has the wrong sign.",
    )


AUX_SHARE = Threshold(
    10.0, "the total over the loss within it, in the first steps: nine parts of ten are something else"
)


_FIRST = 3


_AUX_LOSS_DOMINATES_STEPS = 60


_CONSTANT = 1.5


_GUESSING = 0.95  # of the loss of a guess that knows nothing of its input


@rule(
    "aux_loss_dominates",
    needs=[vitals.ROOT, "facts.losses"],
    fix=(
        "Give the added term (KL, penalty, balance) a smaller weight, or reduce it as the loss is reduced: a mean "
        "beside a mean, not a sum; or raise its weight slowly."
    ),
    refute="Train 100 steps without the added term: if the loss does not fall then either, it is not this.",
    since=_AUX_LOSS_DOMINATES_STEPS,
)
def aux_loss_dominates(case: Case) -> Found | None:
    """An added term drowns the loss it was added to.

    Find a total that is many times the loss it holds, falls, and leaves that loss at that of a guess.
    """
    ratios, loss = root_ratios(case), case.curve(f"{vitals.LOSS}:output")
    if ratios is None or loss is None:
        raise NotMeasured("what backward() was called on, beside a loss function of torch")
    if len(ratios) < 2 * _FIRST or len(loss[1]) < _AUX_LOSS_DOMINATES_STEPS:
        return None
    first, now = float(ratios[:_FIRST].min()), float(ratios[-1])
    # A plain factor before the loss stays what it is; a term of its own changes by itself.
    if first < AUX_SHARE or now > first / _CONSTANT:
        return None
    learning, chance = judge(loss[1]), chance_loss(case)
    if not learning.failed and (chance is None or learning.recent < _GUESSING * chance):
        return None
    kind = next((each.kind for each in case.facts.losses), "loss")
    return Found(
        step=1,
        sites=(vitals.LOSS,),
        evidence=(
            above("what was differentiated over the loss, lowest of the first steps", first, AUX_SHARE),
            fact("the same now", now, "(loop):vital.root mean"),
            fact(f"{kind} of the first steps", learning.initial, f"{vitals.LOSS}:output mean"),
            fact(f"{kind} now", learning.recent),
        ),
        cause=f"What is trained is mostly not the {kind}: at the start the total was {first:.0f} times as large. "
        f"Training has brought the rest down, and the {kind} is no better than a guess that ignores the input.",
    )


@rule(
    "target_not_detached",
    needs=["facts.bootstrapped"],
    explains=[*NOT_TRAINED, "target_scale"],
    exact=True,
    fix="Compute the target under torch.no_grad(), or detach() it; usual is a copy of the model for it.",
    refute="If both sides are meant to move, as in residual-gradient methods, this is wrong.",
    since=1,
)
def target_not_detached(case: Case) -> Found | None:
    """The target of the loss takes part in the gradient.

    Find a loss whose target is data plus a multiple of what the model says, and is differentiated like its input.
    """
    kind = case.need_facts().bootstrapped
    if not kind:
        return None
    return Found(
        step=1,
        sites=(vitals.LOSS, "(loop)"),
        evidence=(fact("sides of the loss that a gradient flows into", 2),),
        cause=f"The target of the loss ({kind}) is made of data and of the model's own output, and the gradient flows "
        "into it as well: instead of the output coming to the target, both meet halfway.",
    )


SUM_UPDATE_RATIO = Threshold(0.03, "a step of 3 % of the weights: thirty times the usual thousandth")


@rule(
    "wrong_loss_reduction",
    needs=[vitals.ROOT, "gradient", "parameter", "update", "facts.losses"],
    explains=[*ANY_STATISTIC],
    fix="Use reduction='mean', or divide the learning rate by the batch size.",
    refute="Train with half the batch size: if steps keep their length, the sum is divided somewhere.",
    since=3,
)
def wrong_loss_reduction(case: Case) -> Found | None:
    """The loss is summed over the batch where a mean was meant.

    Find a summed loss that nobody divides, and steps that are too long for it.

    Where the optimizer's step does not grow with the gradient, or the sum is divided later, a sum does no harm.
    """
    summed = [loss for loss in seen_losses(case) if _is_sum(loss)]
    if not summed or all(optimizer.traits.adaptive for optimizer in need_optimizers(case)):
        return None
    loss = summed[0]
    batch = loss.facts.input_shape[0] if loss.facts is not None and loss.facts.input_shape else 1
    ratio = root_ratio(case)
    if batch < 2 or (ratio is not None and ratio < 0.5):
        return None
    pace = first_weights(case).pace()
    if not len(pace) or float(np.max(pace[:10])) < SUM_UPDATE_RATIO:
        return None
    output = loss.output
    return Found(
        step=1,
        sites=(vitals.LOSS,),
        evidence=(
            above("largest early step as a part of the weights", float(np.max(pace[:10])), SUM_UPDATE_RATIO),
            above("samples that are added up", batch, 2),
            fact("loss at the start", float("nan") if output is None else float(output.numbers()[0])),
        ),
        cause=f"{loss.kind} adds up the {batch} samples of a batch instead of averaging them: gradients, and with them "
        f"steps, are {batch} times as large.",
    )


def _is_sum(loss: SeenLoss) -> bool:
    return loss.facts is not None and loss.facts.settings.get("reduction") == "sum"


ROOT_RATIO = Threshold(0.9, "backward on the loss itself gives 1; divided by the number of micro-batches 0.5 or less")


@rule(
    "accumulation_not_scaled",
    needs=[vitals.BACKWARDS, vitals.FORWARDS, vitals.ROOT, "facts.losses"],
    explains=[*ANY_STATISTIC],
    exact=True,
    fix="Call (loss / {passes:g}).backward(), or divide the learning rate by {passes:g}.",
    refute=("Compare the gradient norm of a step with that of one pass over the same samples: equal norms refute it."),
    since=2,
)
def accumulation_not_scaled(case: Case) -> Found | None:
    """Gradients are accumulated without dividing the loss.

    Find several passes and backward passes per step with a loss that is differentiated as it is.

    With several optimizers, parts of a game are added up on purpose; a sum that is asked for needs no division. An
    optimizer that searches along a line runs as many passes as it likes and adds nothing up.
    """
    optimizers = need_optimizers(case)
    if any(optimizer.traits.searches for optimizer in optimizers):
        return None
    backwards = case.need_vital(vitals.LOOP, vitals.BACKWARDS).last(8)
    forwards = case.need_vital(vitals.LOOP, vitals.FORWARDS).last(8)
    times = float(np.median(backwards.numbers()))
    same = len(forwards) == len(backwards) and bool((forwards.numbers() == backwards.numbers()).all())
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
    # Two passes per step may be one that looks ahead, as sharpness-aware training does, which adds nothing up.
    harmless = optimizers[0].traits.adaptive or times < 3
    return Found(
        severity="info" if harmless else "warning",
        step=int(backwards.steps[0]) if case.step > 60 else 1,
        sites=(vitals.LOSS,),
        evidence=(
            above("backward passes per step", times, 2, f"{backwards.key} mean"),
            above("what backward() was called on, over the loss", ratio, ROOT_RATIO),
            fact("what it would be if divided", 1 / times),
        ),
        cause=f"Each step adds up {times:g} backward passes of the whole loss: gradients are {times:g} times as large "
        "as those of one batch of that size.",
        values={"passes": times},
    )


UNEQUAL_TARGETS = Threshold(1.5, "most targets that count over fewest, among the micro-batches of a step")
UNEQUAL_GRAVE = Threshold(3.0, "the same: a target in one micro-batch weighs three times one in another")


_TOKEN_MEAN_OF_MEANS_STEPS = 2


@rule(
    "token_mean_of_means",
    needs=[vitals.BACKWARDS, vitals.VALID_TARGETS, "facts.losses"],
    exact=True,
    fix=(
        "Compute the loss with reduction='sum' in each micro-batch and divide by the number of targets of the "
        "whole step."
    ),
    refute="Count the targets that are not ignore_index in each micro-batch: equal numbers refute it.",
    since=_TOKEN_MEAN_OF_MEANS_STEPS,
)
def token_mean_of_means(case: Case) -> Found | None:
    """Micro-batches count alike though they hold different numbers of targets.

    Find accumulated means over numbers of targets that differ within a step.
    """
    valid = case.need_vital(vitals.LOSS, vitals.VALID_TARGETS)
    backwards = case.need_vital(vitals.LOOP, vitals.BACKWARDS)
    loss = case.loss_facts("cross_entropy", "nll_loss")
    if loss is None:
        raise NotMeasured("a loss of classes")
    times = float(np.median(backwards.numbers()))
    if times < 2 or loss.settings.get("reduction", "mean") != "mean" or len(case.facts.optimizers) > 1:
        return None
    rows = valid.rows[(valid.rows[:, schema.COUNT] > 1) & (valid.rows[:, schema.MIN] > 0)]
    if len(rows) < _TOKEN_MEAN_OF_MEANS_STEPS:
        return None
    ratio = float(np.median(rows[:, schema.MAX] / rows[:, schema.MIN]))
    if ratio < UNEQUAL_TARGETS:
        return None
    return Found(
        severity="warning" if ratio >= UNEQUAL_GRAVE else "info",
        step=int(valid.steps[0]),
        sites=(vitals.LOSS,),
        evidence=(
            above("most targets of a micro-batch over fewest, within a step", ratio, UNEQUAL_TARGETS),
            above("backward passes per step", times, 2, f"{backwards.key} mean"),
        ),
        cause=f"Each step averages {times:g} means that were taken over different numbers of targets: a target in a "
        f"short micro-batch weighs up to {ratio:.1f} times one in a long one.",
    )
