"""Rules about targets and labels."""

from __future__ import annotations

import math
import re
from typing import Final

import numpy as np

from sonde import schema, vitals
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.nonfinite import READINGS, TOLD_FROM
from sonde.diagnosis.outlook import chance_loss, gravity, is_near_chance
from sonde.diagnosis.rule import Found, Threshold, above, below, fact, rule
from sonde.diagnosis.rules.activations import OUTPUT_SPREAD
from sonde.diagnosis.rules.rates import PACE_LOW
from sonde.diagnosis.seen_loss import seen_losses
from sonde.diagnosis.symptoms import BADLY_SCALED, NOT_FINITE, NOT_TRAINED
from sonde.diagnosis.track import Track
from sonde.diagnosis.weights import last_weights
from sonde.records import Evidence, Severity

SAME_TARGET_STEPS = Threshold(20, "steps in which all targets are one number: more than a class in order takes, mostly")


_REGRESSIONS = ("huber_loss", "l1_loss", "mse_loss", "smooth_l1_loss")


_BINARY = ("binary_cross_entropy", "binary_cross_entropy_with_logits")


# What a layer or its activation returns. Anything else, such as a residual that is to become 0, was computed from it.
_LAYERS = ("", "addmm", "convolution", "mm", "relu", "sigmoid", "softplus", "tanh")


@rule(
    "constant_target",
    needs=["facts.losses"],
    explains=[*NOT_TRAINED, "output_range_mismatch", "saturated_activation", "target_scale"],
    exact=True,
    fix="Look at how targets are read and cast: .long() makes 0 of all fractions, and // of what is smaller.",
    refute="Print the targets of a few batches: two different numbers refute it.",
    since=SAME_TARGET_STEPS,
)
def constant_target(case: Case) -> Found | None:
    """All targets are the same number.

    Find a loss that holds the model's own output against one and the same number, in every batch of the run.
    """
    losses = [loss for loss in seen_losses(case, *_REGRESSIONS, *_BINARY) if loss.target is not None]
    known = case.facts.losses
    # In a game of two each side has targets of its own. Where there are several losses, one may be a pull to zero.
    if len(losses) != 1 or len(known) != 1 or len(case.facts.optimizers) > 1 or known[0].made_by not in _LAYERS:
        return None
    target = losses[0].target
    # Samples that come class by class have equal targets for a while.
    if target is None or (losses[0].kind in _BINARY and not case.final) or not _is_constant(target):
        return None
    number = float(target.rows[-1, schema.MAX])
    return Found(
        step=int(target.steps[0]),
        sites=(vitals.LOSS, "loader"),
        evidence=(
            above("steps in which all targets were the same", len(target), SAME_TARGET_STEPS, target.key),
            fact("the number they were", number),
        ),
        cause=f"Every target is {number:g}: the model can only learn to answer with that.",
    )


def _is_constant(target: Track) -> bool:
    low, high = target.rows[:, schema.MIN], target.rows[:, schema.MAX]
    enough = len(target) >= SAME_TARGET_STEPS and float(target.rows[:, schema.COUNT].min()) > 1
    bad = target.rows[:, [schema.NAN, schema.POS_INF, schema.NEG_INF]] > 0
    return enough and not bad.any() and bool(np.all(low == high[0]) and np.all(high == high[0]))


TARGET_STD = Threshold(100.0, "standard deviation of a target of real numbers")
TARGET_OFFSET = Threshold(10.0, "distance of the target from zero in standard deviations")
TARGET_REACH = Threshold(30.0, "size of the target over that of the model's first outputs: they must grow thirtyfold")


@rule(
    "target_scale",
    needs=["facts.losses"],
    explains=[*BADLY_SCALED],
    fix="Train on (y - y.mean()) / y.std() and scale predictions back, or set the last bias to the mean.",
    refute="Train 50 steps on the standardised target: if the loss falls no faster, it is not this.",
    since=3,
)
def target_scale(case: Case) -> Found | None:
    """The target of a regression is huge or far from zero.

    Find targets of real numbers whose spread or distance from zero is far from what a fresh layer puts out.
    """
    if case.loss_facts("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss") is None:
        raise NotMeasured("a loss of real numbers")
    target = case.track(f"{vitals.LOSS}:input.target")
    if target is None or "float" not in target.site.dtype:
        raise NotMeasured("loss_fn:input.target")
    std, mean = float(np.median(target.stat("std"))), float(np.median(target.stat("mean")))
    offset = abs(mean) / std if std > 0 else 0.0
    if std >= TARGET_STD:
        worst = above("standard deviation of the target", std, TARGET_STD, f"{target.key} std")
    elif offset >= TARGET_OFFSET and abs(mean) >= 10:
        worst = above("distance of the target from zero in standard deviations", offset, TARGET_OFFSET)
    elif (reach := _reach(case, mean, std)) >= TARGET_REACH and gravity(case) == "warning":
        worst = above("size of the target over that of the first outputs", reach, TARGET_REACH)
    else:
        return None
    return Found(
        severity=gravity(case),
        step=int(target.steps[0]),
        sites=("loader", "loss_fn"),
        evidence=(worst, fact("mean of the target", mean, f"{target.key} mean")),
        cause="The target is badly scaled: a fresh model puts out numbers near 0, and gradients are as large as the "
        "distance.",
    )


def _reach(case: Case, mean: float, std: float) -> float:
    """Return how many times as large as the model's first outputs the target is; 0 if that is not known."""
    outputs = case.track(f"{vitals.LOSS}:input.input")
    first = float(outputs.stat("rms")[0]) if outputs is not None and len(outputs) else 0.0
    size = float(np.hypot(mean, std))
    return size / first if first > 0 and size >= 1 else 0.0


_SAID: Final = re.compile(r"Target (-?\d+) is out of bounds|t >= 0 && t < n_classes")


@rule(
    "label_out_of_range",
    needs=["facts.losses"],
    explains=["not_shuffled"],
    severity="critical",
    exact=True,
    fix="Make the last layer as wide as the highest label plus one, or map labels to 0 ... C-1.",
    refute="Print the smallest and the largest label and the width of the output: a fit refutes it.",
    since=0,
)
def label_out_of_range(case: Case) -> Found | None:
    """A label is no class of the model.

    Find class labels below 0 or beyond the last class, or the error that they raise.
    """
    evidence = _from_error(case) or _from_values(case)
    if evidence is None:
        return None
    return Found(
        sites=("loss_fn", "loader"),
        evidence=evidence,
        cause="A label is no class of the model: the output layer has too few classes, or labels do not begin at 0.",
    )


def _from_error(case: Case) -> tuple[Evidence, ...] | None:
    for event in case.events:
        match = _SAID.search(event.message) if event.event_type == "exception" else None
        if match is not None:
            label = float(match.group(1)) if match.group(1) else float("nan")
            loss = case.loss_facts("cross_entropy", "nll_loss")
            classes = float("nan") if loss is None or not loss.classes else float(loss.classes)
            return (fact("label", label), fact("classes of the output, where known", classes))
    return None


def _from_values(case: Case) -> tuple[Evidence, ...] | None:
    loss = case.loss_facts("cross_entropy", "nll_loss")
    target = case.track(f"{vitals.LOSS}:input.target")
    if loss is None or target is None or not loss.classes or "int" not in target.site.dtype:
        return None
    ignored = loss.settings.get("ignore_index", -100)
    low, high = float(target.stat("min").min()), float(target.stat("max").max())
    if low < 0 and low != ignored:
        return (below("smallest label", low, -1, f"{target.key} min"), fact("classes", loss.classes))
    if high >= loss.classes and high != ignored:
        return (above("largest label", high, loss.classes, f"{target.key} max"), fact("classes", loss.classes))
    return None


MISMATCH_STEPS = Threshold(60, "steps at a healthy pace without any progress")
MISMATCH_SIGMAS = Threshold(
    3.0, "standard errors above chance that neighbours' agreement must reach to show a relation"
)
MISMATCH_LOSS = Threshold(0.95, "of the entropy of the labels: nothing but their frequency was learnt")


_PATIENCE_WITH_WORDS = 2.5


@rule(
    "label_shuffle_mismatch",
    needs=[
        vitals.LABEL_COUNTS,
        vitals.NEIGHBOUR_AGREEMENT,
        vitals.SAMPLE_SPREAD,
        "gradient",
        "input",
        "parameter",
        "update",
    ],
    explains=["constant_output", "lr_too_high", "overfitting"],
    fix="Check where inputs and labels are shuffled, sorted or filtered: both need the same indices.",
    refute="Look at twenty samples with their labels: if they are right, it is not this.",
    since=MISMATCH_STEPS,
)
def label_shuffle_mismatch(case: Case) -> Found | None:
    """Labels do not belong to their inputs.

    Find inputs whose nearest neighbours agree no more than by chance, and a loss that stays at guessing.
    """
    agreement = case.need_vital(vitals.LOSS, vitals.NEIGHBOUR_AGREEMENT)
    counts = case.need_vital(vitals.LOSS, vitals.LABEL_COUNTS)
    patience = MISMATCH_STEPS * (_PATIENCE_WITH_WORDS if _reads_words(case) else 1)
    if case.learning.points < patience or not _is_stuck(case):
        return None
    samples = float(agreement.stat("count")[-1])
    share, chance = float(agreement.numbers()[-1]), _chance(counts.rows)
    if not 0 < chance < 0.9 or _says_one_thing(case):
        return None
    sigma = math.sqrt(chance * (1 - chance) / max(samples, 1))
    limit = chance + MISMATCH_SIGMAS * sigma
    if share > limit:
        return None
    learning, entropy = case.learning, chance_loss(case) or float("nan")
    return Found(
        step=int(agreement.steps[-1]),
        sites=("loader",),
        evidence=(
            below("share of samples whose nearest neighbour has the same label", share, limit, f"{agreement.key} mean"),
            fact("the same by chance", chance),
            above("loss over the entropy of the labels", learning.recent / entropy, MISMATCH_LOSS),
        ),
        cause="Labels do not belong to their inputs: samples that look alike agree no more than by chance, and the "
        "model learns nothing but how frequent labels are.",
    )


def _says_one_thing(case: Case) -> bool:
    """Say whether the model gave all samples one answer from the first step on: then it cannot tell them apart."""
    spread = case.vital(vitals.LOSS, vitals.SAMPLE_SPREAD)
    inputs = case.track(f"{vitals.LOSS}:input.input")
    if spread is None or inputs is None:
        return False
    size = float(inputs.stat("rms")[0])
    return float(spread.numbers()[0]) <= OUTPUT_SPREAD * min(1.0, size**2)


def _reads_words(case: Case) -> bool:
    """Say whether the model is given whole numbers: counting words says less of a text than pixels say of a picture."""
    first = next((site for site in case.sites("input") if site.name != vitals.LOSS), None)
    return first is not None and "int" in first.dtype


def _is_stuck(case: Case) -> bool:
    pace = last_weights(case).pace()
    moves = len(pace) > 0 and float(np.median(pace)) >= PACE_LOW
    return moves and is_near_chance(case, MISMATCH_LOSS)


def _chance(rows: schema.Rows) -> float:
    """Return how often two labels are equal, without the bias of small batches."""
    classes, mean = rows[:, schema.COUNT], rows[:, schema.MEAN]
    totals = classes * mean
    squares = rows[:, schema.M2] + classes * mean**2
    usable = totals > 1
    if not usable.any():
        return float("nan")
    totals, squares = totals[usable], squares[usable]
    return float((squares - totals).sum() / (totals * (totals - 1)).sum())


IMBALANCE_STEPS = Threshold(50, "steps in which it could have learnt better")
IMBALANCE_ENTROPY = Threshold(0.33, "nats: the entropy of two classes at 9 to 1")
PREDICTED_ENTROPY = Threshold(1e-3, "nats: all answers of a batch are the same class")


@rule(
    "class_imbalance_collapse",
    needs=[vitals.LABEL_COUNTS, vitals.PREDICTED_ENTROPY, vitals.RUNNING_LABEL_ENTROPY, "facts.losses"],
    explains=["constant_output", "dormant_units"],
    fix="Weight the loss (nn.CrossEntropyLoss(weight=...)), use a WeightedRandomSampler, and look at recall.",
    refute="Compute the recall of the rare class: above 0 refutes it.",
    since=IMBALANCE_STEPS,
)
def class_imbalance_collapse(case: Case) -> Found | None:
    """The model always answers with the most frequent class.

    Find very uneven labels and a model that, after many steps, still answers with one class only.
    """
    labels = case.need_vital(vitals.LOSS, vitals.RUNNING_LABEL_ENTROPY)
    predicted = case.need_vital(vitals.LOSS, vitals.PREDICTED_ENTROPY)
    loss = case.loss_facts("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")
    entropy = float(labels.numbers()[-1])
    late = predicted.since(int(IMBALANCE_STEPS)).numbers()
    if loss is None or math.prod(loss.target_shape[1:]) != 1 or len(late) < 2 or len(case.facts.optimizers) > 1:
        return None
    uneven = 0 < entropy <= IMBALANCE_ENTROPY
    answer = float(np.max(late[-3:]))
    if not uneven or answer > PREDICTED_ENTROPY:
        return None
    counts = case.vital(vitals.LOSS, vitals.LABEL_COUNTS)
    rows = None if counts is None else counts.stat("max") / (counts.stat("mean") * counts.stat("count"))
    return Found(
        severity=_severity(case, entropy, weighted=bool(loss.settings.get("weighted"))),
        step=int(predicted.steps[-len(late)]),
        sites=("loader", "loss_fn"),
        evidence=(
            below("entropy of the labels in nats", entropy, IMBALANCE_ENTROPY, f"{labels.key} mean"),
            below("entropy of the answers in nats", answer, PREDICTED_ENTROPY, f"{predicted.key} mean"),
            fact("share of the most frequent label", float("nan") if rows is None else float(np.median(rows))),
        ),
        cause="One class is so frequent that the model always answers with it: high accuracy, nothing learnt."
        + (" The weights of the loss do not make up for it." if loss.settings.get("weighted") else ""),
        fix="Make the weights of classes fall with their number (1 / count, not count), and look at recall."
        if loss.settings.get("weighted")
        else "",
    )


def _severity(case: Case, entropy: float, *, weighted: bool) -> Severity:
    learning = case.learning
    if weighted:  # somebody meant rare classes to count, and what the loss is says nothing about the labels
        return "warning" if learning.points else "info"
    return "warning" if learning.points and learning.recent >= 0.5 * entropy else "info"


@rule(
    "empty_target",
    needs=[vitals.VALID_TARGETS],
    explains=[*NOT_FINITE, "dead_relu", "lr_too_high"],
    exact=True,
    fix=(
        "Leave such samples out when the data is made, or skip the batch; reduction='sum' divided by "
        "max(1, number of valid targets) is safe too."
    ),
    refute="Count targets != ignore_index in that batch: any refutes it.",
    since=1,
    lasting=True,
)
def empty_target(case: Case) -> Found | None:
    """A batch has no target that counts.

    Find a batch whose targets are all ignore_index: the mean over none of them is not a number.
    """
    tracks = case.vitals(vitals.VALID_TARGETS)
    if not tracks:
        raise NotMeasured("loss_fn:vital.valid_targets")
    for track in tracks:
        empty = track.numbers() == 0
        if not empty.any():
            continue
        step = int(track.steps[empty][0])
        output = case.track(f"{vitals.LOSS}:output")
        broken = output is not None and bool((output.stat("nonfinite") > 0).any())
        return Found(
            severity="critical" if broken else "warning",
            step=step,
            sites=("loader", vitals.LOSS),
            evidence=(
                below("targets of the batch that count", 0, 0, f"{track.key} mean"),
                fact("such batches among those looked at", int(empty.sum())),
            ),
            cause=f"In step {step} every target of the batch is ignore_index: the loss averages over nothing"
            + (", which is NaN." if broken else "."),
            data={TOLD_FROM: READINGS},
        )
    return None


COUNTED_SHARE = Threshold(0.5, "of the targets that are padding and count: more than about words, the loss is about it")
VALID_SHARE = Threshold(0.5, "of the targets that count")


_LOOKS = 3


@rule(
    "padding_dominates",
    needs=[vitals.COUNTED_PADDING, vitals.VALID_TARGETS, "facts.losses"],
    fix="Sort samples by length into buckets, or pack several sequences into one row.",
    refute="Count the targets that are not ignore_index in a few batches: more than half refutes it.",
    since=3,
)
def padding_dominates(case: Case) -> Found | None:
    """Batches are mostly padding.

    Find batches that are mostly padding: it counts in the loss, or most targets do not count.
    """
    counted = case.vital(vitals.LOSS, vitals.COUNTED_PADDING)
    if counted is not None and len(counted) >= _LOOKS:
        share = float(np.median(counted.numbers()))
        if share > COUNTED_SHARE:
            return _counts(case, counted, share)
    valid = case.need_vital(vitals.LOSS, vitals.VALID_TARGETS)
    loss = case.loss_facts("cross_entropy", "nll_loss")
    if loss is None or len(valid) < 5 or len(loss.target_shape) < 1:
        return None
    target = case.track(f"{vitals.LOSS}:input.target")
    if target is None:
        return None
    # A step may have several batches, of which only some were looked at.
    each = target.stat("count") / np.maximum(target.rows[:, schema.SEEN], 1)
    counts = dict(zip(target.steps.tolist(), each.tolist(), strict=True))
    shares = [n / counts[step] for step, n in zip(valid.steps.tolist(), valid.numbers(), strict=True) if step in counts]
    # Of large targets only a part is counted; then the share cannot be told.
    share = float(np.median(shares)) if shares else float("nan")
    if not 0 < share < VALID_SHARE:
        return None
    return Found(
        severity="info",
        step=int(valid.steps[0]),
        sites=("loader", "loss_fn"),
        evidence=(
            below("share of targets that count", share, VALID_SHARE, f"{valid.key} mean"),
            fact("batches looked at", len(valid)),
        ),
        cause=f"Only {share:.0%} of the targets count: most of every batch is padding, and most of the work is wasted.",
    )


def _counts(case: Case, counted: Track, share: float) -> Found:
    return Found(
        severity="warning",
        step=int(counted.steps[0]),
        sites=("loss_fn", "loader"),
        evidence=(
            above("share of the targets that are padding and count", share, COUNTED_SHARE, counted.key),
            fact("batches looked at", len(counted)),
        ),
        cause=f"{share:.0%} of what the loss averages over is padding: rows end in one and the same token, which "
        "always has the same label. The model is praised for padding, and the rest is diluted.",
        fix="Give the label of padding to the loss as ignore_index, or set those targets to -100.",
        refute="Count the targets where the input is padding: less than half refutes it.",
    )
