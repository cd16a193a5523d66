"""Rules about targets and labels."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Final

import numpy as np

from sonde.core import schema, signals
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.nonfinite import BASIS, READINGS
from sonde.diagnosis.outlook import anomaly_severity, beginning_severity, chance_loss, is_near_chance
from sonde.diagnosis.rule import Found, Threshold, above, below, fact, rule
from sonde.diagnosis.rules.activations import OUTPUT_SPREAD
from sonde.diagnosis.rules.rates import PACE_LOW
from sonde.diagnosis.seen_loss import seen_losses
from sonde.diagnosis.symptoms import ANY_STATISTIC, BADLY_SCALED, NOT_FINITE, NOT_TRAINED
from sonde.diagnosis.tape.contracts import broken
from sonde.diagnosis.tape.pairing import crossed_rows, disagreeing_targets, indexed_apart, misaligned, reordered
from sonde.diagnosis.tape.roles import inverted_weights, learnt_padding, mixed_without_targets
from sonde.diagnosis.tape.targets import own_answers, unrelated_noise
from sonde.diagnosis.tape.tokens import read_after_padding, wraps_around
from sonde.diagnosis.track import Track
from sonde.diagnosis.weights import first_weights, last_weights
from sonde.records import Evidence, Severity

SAME_TARGET_STEPS = Threshold(20, "persistence: steps in which all targets are one number; a sorted class takes fewer")
_REGRESSIONS = ("huber_loss", "l1_loss", "mse_loss", "smooth_l1_loss")
_BINARY = ("binary_cross_entropy", "binary_cross_entropy_with_logits")
_CLASSES = ("cross_entropy", "nll_loss")
# What layers and activations return. A loss of anything else, such as a residual, may have a constant target, but for
# one of yes and no: its scores, such as products of pairs, only grow then.
_LAYERS = ("", "addmm", "convolution", "mm", "relu", "sigmoid", "softplus", "tanh")


@rule(
    "constant_target",
    needs=["facts.losses"],
    explains=[*NOT_TRAINED, "output_range_mismatch", "saturated_activation", "target_scale"],
    exact=True,
    fix="Check how targets are read and cast: .long() turns fractions into 0, as does // for small numbers.",
    refute="Print the targets of a few batches: if they hold two different numbers, this finding is wrong.",
    since=SAME_TARGET_STEPS,
)
def constant_target(case: Case) -> Found | None:
    """All targets are the same number, in every batch of the run."""
    losses = [loss for loss in seen_losses(case, *_REGRESSIONS, *_BINARY, *_CLASSES) if loss.target is not None]
    known = case.facts.losses
    # In adversarial training each side has its own targets. Of several losses, one may pull towards zero.
    if len(losses) != 1 or len(known) != 1 or len(case.facts.optimizers) > 1:
        return None
    if known[0].made_by not in _LAYERS and losses[0].kind not in _BINARY:
        return None
    target = losses[0].target
    # Sorted samples have equal targets for a while.
    if target is None or (losses[0].kind not in _REGRESSIONS and not case.final) or not _is_constant(target):
        return None
    number = float(target.rows[-1, schema.MAX])
    return Found(
        step=int(target.steps[0]),
        sites=(signals.LOSS, "loader"),
        evidence=(
            above("steps in which all targets were the same", len(target), SAME_TARGET_STEPS, target.key),
            fact("that number", number),
        ),
        cause=f"Every target is {number:g}: the model can only learn this constant.",
    )


def _is_constant(target: Track) -> bool:
    low, high = target.rows[:, schema.MIN], target.rows[:, schema.MAX]
    enough = len(target) >= SAME_TARGET_STEPS and float(target.rows[:, schema.COUNT].min()) > 1
    bad = target.rows[:, [schema.NAN, schema.POS_INF, schema.NEG_INF]] > 0
    return enough and not bad.any() and bool(np.all(low == high[0]) and np.all(high == high[0]))


TARGET_STD = Threshold(100.0, "standard deviation of a target of real numbers; outputs of a fresh layer have about 1")
TARGET_OFFSET = Threshold(10.0, "distance of the target from zero in standard deviations")
TARGET_MEAN = Threshold(10.0, "distance of the target from zero: a fresh layer learns a smaller one in a few steps")
TARGET_REACH = Threshold(30.0, "size of the target over that of the first outputs: they must grow thirtyfold")


@rule(
    "target_scale",
    needs=["facts.losses"],
    explains=[*BADLY_SCALED],
    fix="Train on (y - y.mean()) / y.std() and scale predictions back, or set the last bias to the mean.",
    refute="Train 50 steps on the standardised target: if the loss does not fall faster, this finding is wrong.",
    since=3,
)
def target_scale(case: Case) -> Found | None:
    """The targets of a regression are huge or far from zero."""
    if case.loss_facts("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss") is None:
        raise NotMeasured("a loss of real numbers")
    target = case.track(f"{signals.LOSS}:input.target")
    if target is None or "float" not in target.site.dtype:
        raise NotMeasured("loss_fn:input.target")
    std, mean = float(np.median(target.stat("std"))), float(np.median(target.stat("mean")))
    offset = abs(mean) / std if std > 0 else 0.0
    if std >= TARGET_STD:
        worst = above("standard deviation of the target", std, TARGET_STD, f"{target.key} std")
    elif offset >= TARGET_OFFSET and abs(mean) >= TARGET_MEAN:
        worst = above("distance of the target from zero in standard deviations", offset, TARGET_OFFSET)
    elif (reach := _reach(case, mean, std)) >= TARGET_REACH and anomaly_severity(case) == "warning":
        worst = above("size of the target over that of the first outputs", reach, TARGET_REACH)
    else:
        return None
    return Found(
        severity=beginning_severity(case),
        step=int(target.steps[0]),
        sites=("loader", "loss_fn"),
        evidence=(worst, fact("mean of the target", mean, f"{target.key} mean")),
        cause="The target is badly scaled: a fresh model returns numbers near 0, and gradients are as large as the "
        "distance.",
    )


def _reach(case: Case, mean: float, std: float) -> float:
    """Return the size of the target over that of the model's first outputs; 0 if that is not known."""
    outputs = case.track(f"{signals.LOSS}:input.input")
    first = float(outputs.stat("rms")[0]) if outputs is not None and len(outputs) else 0.0
    size = float(np.hypot(mean, std))
    return size / first if first > 0 and size >= 1 else 0.0


_SAID: Final = re.compile(r"Target (-?\d+) is out of bounds|t >= 0 && t < n_classes")


@rule(
    "label_out_of_range",
    needs=["facts.losses"],
    explains=[*ANY_STATISTIC, "loss_sign_flipped", "loss_divergence", "not_shuffled", "target_scale"],
    severity="critical",
    exact=True,
    fix="Make the last layer as wide as the highest label plus one, or map labels to 0 ... C-1.",
    refute="Print the smallest and largest label and the width of the output: if they fit, this finding is wrong.",
    since=0,
)
def label_out_of_range(case: Case) -> Found | None:
    """A label is outside the model's class range."""
    evidence = _from_error(case) or _from_values(case)
    if evidence is None:
        return broken(case, "label_out_of_range")
    return Found(
        sites=("loss_fn", "loader"),
        evidence=evidence,
        cause="A label is outside the model's class range: the output layer has too few classes, or labels do not "
        "start "
        "at 0.",
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
    target = case.track(f"{signals.LOSS}:input.target")
    if loss is None or target is None or not loss.classes or "int" not in target.site.dtype:
        return None
    ignored = loss.settings.get("ignore_index", -100)
    low, high = float(target.stat("min").min()), float(target.stat("max").max())
    if low < 0 and low != ignored:
        return (below("smallest label", low, -1, f"{target.key} min"), fact("classes", loss.classes))
    if high >= loss.classes and high != ignored:
        return (above("largest label", high, loss.classes, f"{target.key} max"), fact("classes", loss.classes))
    return None


MISMATCH_STEPS = Threshold(60, "steps of a usual length without any progress")
MISMATCH_WORDS = Threshold(2.5, "times as many steps for tokens: counts of words say less about a text than pixels do")
MISMATCH_LOSS = Threshold(0.95, "loss over the entropy of the labels: only their frequency was learnt")
MISMATCH_SIGMAS = Threshold(3.0, "standard errors above chance: less agreement of neighbours shows no relation")
MISMATCH_CHANCE = Threshold(0.9, "agreement by chance: where labels are mostly equal, neighbours say little")
_PATIENCE_WITH_WORDS = 2.5


@rule(
    "label_shuffle_mismatch",
    needs=[
        signals.LABEL_COUNTS,
        signals.NEIGHBOUR_AGREEMENT,
        signals.SAMPLE_SPREAD,
        "gradient",
        "input",
        "parameter",
        "update",
        "facts.order",
    ],
    explains=["constant_output", "lr_too_high", "overfitting"],
    fix="Check where inputs and labels are shuffled, sorted or filtered: both need the same indices.",
    refute="Look at twenty samples with their labels: if they are right, this finding is wrong.",
)
def label_shuffle_mismatch(case: Case) -> Found | None:
    """Labels do not belong to their inputs.

    Nearest neighbours have equal labels no more often than by chance, and the loss stays at that of guessing.
    """
    for question in _MISMATCHES:
        if (taped := question(case)) is not None:
            return replace(taped, exact=True)
    if (apart := _shuffled_apart(case)) is not None:
        return apart
    agreement = case.need_vital(signals.LOSS, signals.NEIGHBOUR_AGREEMENT)
    counts = case.need_vital(signals.LOSS, signals.LABEL_COUNTS)
    patience = MISMATCH_STEPS * (MISMATCH_WORDS if _reads_words(case) else 1)
    if case.learning.points < patience or not _is_stuck(case):
        return None
    samples = float(agreement.stat("count")[-1])
    share, chance = float(agreement.numbers()[-1]), _chance(counts.rows)
    if not 0 < chance < MISMATCH_CHANCE or _answers_alike(case):
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
        cause="Labels do not belong to their inputs: similar samples have equal labels no more often than by chance, "
        "and "
        "the model learns only how frequent labels are.",
    )


def _shuffled_apart(case: Case) -> Found | None:
    """Find inputs whose rows are in another order than in the table that they come from, unlike their targets."""
    for call in case.facts.calls("data.shuffled_apart"):
        targets, inputs = call.data.get("of_targets"), call.data.get("of_inputs")
        return Found(
            exact=True,
            step=call.steps[0],
            sites=("loader", "(data)", call.about),
            evidence=(fact("rows", float(call.data.get("rows") or 0)),),
            cause=f"`{call.about}` holds the rows of `{inputs}` in another order, and `{call.data.get('targets')}` "
            f"those of `{targets}` in the old one: inputs and targets do not belong together.",
            fix=f"Take both by the same indices: {call.about} = {call.about}[order]; "
            f"{call.data.get('targets')} = {call.data.get('targets')}[order].",
            refute=f"Find the first rows of {call.about} in {inputs}: if they have the same places there as their "
            f"targets have in {targets}, this finding is wrong.",
        )
    return None


_MISMATCHES: Final = (
    unrelated_noise,
    reordered,
    mixed_without_targets,
    crossed_rows,
    indexed_apart,
    disagreeing_targets,
    misaligned,
    wraps_around,
)


def _answers_alike(case: Case) -> bool:
    """Return whether the model gave all samples the same answer from the first step on."""
    spread = case.vital(signals.LOSS, signals.SAMPLE_SPREAD)
    inputs = case.track(f"{signals.LOSS}:input.input")
    if spread is None or inputs is None:
        return False
    size = float(inputs.stat("rms")[0])
    return float(spread.numbers()[0]) <= OUTPUT_SPREAD * min(1.0, size**2)


def _reads_words(case: Case) -> bool:
    """Return whether the model reads tokens."""
    first = next((site for site in case.sites("input") if site.name != signals.LOSS), None)
    return first is not None and "int" in first.dtype


def _is_stuck(case: Case) -> bool:
    pace = last_weights(case).pace()
    if not len(pace):
        pace = first_weights(case).pace()  # a budget leaves out most of the later steps
    moves = len(pace) > 0 and float(np.median(pace)) >= PACE_LOW
    return moves and is_near_chance(case, MISMATCH_LOSS)


def _chance(rows: schema.Rows) -> float:
    """Return how often two labels are equal by chance, without the bias of small batches."""
    classes, mean = rows[:, schema.COUNT], rows[:, schema.MEAN]
    totals = classes * mean
    squares = rows[:, schema.M2] + classes * mean**2
    usable = totals > 1
    if not usable.any():
        return float("nan")
    totals, squares = totals[usable], squares[usable]
    return float((squares - totals).sum() / (totals * (totals - 1)).sum())


IMBALANCE_STEPS = Threshold(50, "steps in which the model could have learnt the other classes")
IMBALANCE_ENTROPY = Threshold(0.33, "nats of label entropy: two classes at 9 to 1")
IMBALANCE_LOSS = Threshold(0.5, "loss over the entropy of the labels: below, rare classes were learnt")
PREDICTED_ENTROPY = Threshold(1e-3, "nats: all answers of a batch are the same class")


@rule(
    "class_imbalance_collapse",
    needs=[signals.LABEL_COUNTS, signals.PREDICTED_ENTROPY, signals.RUNNING_LABEL_ENTROPY, "facts.losses"],
    explains=["constant_output"],
    fix="Weight the loss (nn.CrossEntropyLoss(weight=...)), use a WeightedRandomSampler, and look at recall.",
    refute="Compute the recall of the rare class: if it is above 0, this finding is wrong.",
    since=IMBALANCE_STEPS,
)
def class_imbalance_collapse(case: Case) -> Found | None:
    """The model always answers with the most frequent class, or the loss asks it to."""
    if (taped := inverted_weights(case)) is not None:
        return taped
    labels = case.need_vital(signals.LOSS, signals.RUNNING_LABEL_ENTROPY)
    predicted = case.need_vital(signals.LOSS, signals.PREDICTED_ENTROPY)
    loss = case.loss_facts("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")
    entropy = float(labels.numbers()[-1])
    late = predicted.since(int(IMBALANCE_STEPS)).numbers()
    if loss is None or math.prod(loss.target_shape[1:]) != 1 or len(late) < 2 or len(case.facts.optimizers) > 1:
        return None
    uneven = 0 < entropy <= IMBALANCE_ENTROPY
    answer = float(np.max(late[-3:]))
    if not uneven or answer > PREDICTED_ENTROPY:
        return None
    counts = case.vital(signals.LOSS, signals.LABEL_COUNTS)
    rows = None if counts is None else counts.stat("max") / (counts.stat("mean") * counts.stat("count"))
    weighted = bool(loss.settings.get("weighted"))
    return Found(
        severity=_severity(case, entropy, weighted=weighted),
        step=int(predicted.steps[-len(late)]),
        sites=("loader", "loss_fn"),
        evidence=(
            below("entropy of the labels in nats", entropy, IMBALANCE_ENTROPY, f"{labels.key} mean"),
            below("entropy of the answers in nats", answer, PREDICTED_ENTROPY, f"{predicted.key} mean"),
            fact("share of the most frequent label", float("nan") if rows is None else float(np.median(rows))),
        ),
        cause="One class is so frequent that the model always answers with it: high accuracy, nothing learnt."
        + (" The weights of the loss do not compensate for it." if weighted else ""),
        fix="Give rare classes larger weights (1 / count, not count), and look at recall." if weighted else "",
    )


def _severity(case: Case, entropy: float, *, weighted: bool) -> Severity:
    learning = case.learning
    # A weighted loss shows that rare classes matter, and cannot be compared with the entropy of the labels.
    high = weighted or learning.recent >= IMBALANCE_LOSS * entropy
    return "warning" if learning.points and high else "info"


@rule(
    "empty_target",
    needs=[signals.VALID_TARGETS],
    explains=[*NOT_FINITE, "dead_relu", "lr_too_high"],
    exact=True,
    fix=(
        "Drop such samples from the data, or skip the batch; reduction='sum' divided by max(1, number of valid "
        "targets) "
        "is safe too."
    ),
    refute="Count targets != ignore_index in that batch: if there is any, this finding is wrong.",
    lasting=True,
)
def empty_target(case: Case) -> Found | None:
    """A batch has no valid target: all are ignore_index, and their mean is NaN."""
    tracks = case.need_vitals("loss_fn", signals.VALID_TARGETS)
    for track in tracks:
        empty = track.numbers() == 0
        if not empty.any():
            continue
        step = int(track.steps[empty][0])
        output = case.track(f"{signals.LOSS}:output")
        broken = output is not None and bool((output.stat("nonfinite") > 0).any())
        return Found(
            severity="critical" if broken else "warning",
            step=step,
            sites=("loader", signals.LOSS),
            evidence=(
                below("valid targets of the batch", 0, 0, f"{track.key} mean"),
                fact("such batches among those sampled", int(empty.sum())),
            ),
            cause=f"In step {step} every target of the batch is ignore_index: the loss averages over nothing"
            + (", which is NaN." if broken else "."),
            data={BASIS: READINGS},
        )
    return None


COUNTED_SHARE = Threshold(0.5, "share of targets that are padding and count: most of the loss comes from padding")
COUNTED_LOOKS = Threshold(3, "persistence: batches sampled")
VALID_SHARE = Threshold(0.5, "share of targets that count: most of the work is wasted")
VALID_LOOKS = Threshold(5, "persistence: batches sampled")


@rule(
    "padding_dominates",
    needs=[signals.COUNTED_PADDING, signals.VALID_TARGETS, "facts.losses"],
    explains=[*NOT_TRAINED, "input_ignored", "optimizer_step_noop"],
    fix="Pass the label of padding to the loss as ignore_index; bucket samples by length, or pack sequences into rows.",
    refute="Count the targets that are padding in a few batches: if they are less than half, this finding is wrong.",
    since=COUNTED_LOOKS,
)
def padding_dominates(case: Case) -> Found | None:
    """Batches are mostly padding, which counts in the loss, hides what was read, or wastes the work."""
    if (taped := read_after_padding(case) or learnt_padding(case)) is not None:
        return replace(taped, exact=True)
    counted = case.vital(signals.LOSS, signals.COUNTED_PADDING)
    if counted is not None and len(counted) >= COUNTED_LOOKS:
        share = float(np.median(counted.numbers()))
        if share > COUNTED_SHARE:
            return _padding_counts(counted, share)
    valid = case.need_vital(signals.LOSS, signals.VALID_TARGETS)
    loss = case.loss_facts("cross_entropy", "nll_loss")
    if loss is None or len(valid) < VALID_LOOKS or len(loss.target_shape) < 1:
        return None
    target = case.track(f"{signals.LOSS}:input.target")
    if target is None:
        return None
    # A step may have several batches, of which only some were sampled.
    each = target.stat("count") / np.maximum(target.rows[:, schema.SEEN], 1)
    counts = dict(zip(target.steps.tolist(), each.tolist(), strict=True))
    shares = [n / counts[step] for step, n in zip(valid.steps.tolist(), valid.numbers(), strict=True) if step in counts]
    # Of large targets only a part is counted; then the share is not known.
    share = float(np.median(shares)) if shares else float("nan")
    if not 0 < share < VALID_SHARE:
        return None
    return Found(
        severity="info",
        step=int(valid.steps[0]),
        sites=("loader", "loss_fn"),
        evidence=(
            below("share of targets that count", share, VALID_SHARE, f"{valid.key} mean"),
            fact("batches sampled", len(valid)),
        ),
        cause=f"Only {share:.0%} of the targets count: most of every batch is padding, and most of the work is wasted.",
        fix="Bucket samples by length, or pack several sequences into one row.",
    )


def _padding_counts(counted: Track, share: float) -> Found:
    return Found(
        severity="warning",
        step=int(counted.steps[0]),
        sites=("loss_fn", "loader"),
        evidence=(
            above("share of targets that are padding and count", share, COUNTED_SHARE, counted.key),
            fact("batches sampled", len(counted)),
        ),
        cause=f"{share:.0%} of what the loss averages over is padding: rows end in the same token, which always has "
        "the "
        "same label. The model is rewarded for predicting padding, and the rest is diluted.",
        fix="Pass the label of padding to the loss as ignore_index, or set those targets to -100.",
    )


@rule(
    "target_from_output",
    severity="critical",
    exact=True,
    explains=[*NOT_TRAINED],
    fix="Compare the outputs with the labels of the batch.",
    refute="Print where the target comes from: if the model's outputs are not in it, this finding is wrong.",
)
def target_from_output(case: Case) -> Found | None:
    """The target of the loss is made of the very outputs that it judges."""
    case.need_tape()
    return own_answers(case)
