"""Rules about what a loss function is given: logits, probabilities, shapes and ranges."""

from __future__ import annotations

import math
from math import prod

import numpy as np

from sonde.core import schema, signals
from sonde.core.facts import ColumnFacts, SoftmaxFacts
from sonde.core.schema import Rows
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.ownership import last_module
from sonde.diagnosis.rule import Found, Threshold, above, below, fact, rule
from sonde.diagnosis.seen_loss import SeenLoss, seen_losses
from sonde.diagnosis.symptoms import ANY_STATISTIC, NOT_TRAINED
from sonde.diagnosis.tape.contracts import broken, samples_out_of_reach
from sonde.diagnosis.tape.losses import (
    wrong_axis,
    wrongly_broadcast,
)
from sonde.diagnosis.tape.roles import overlap_of_logits
from sonde.diagnosis.track import Track, Values

ROW_SUM_ERROR = Threshold(1e-3, "distance of a row's sum from 1: 1e-6 in float32, more for large vocabularies")
COARSE_SUM_ERROR = Threshold(2e-2, "the same in bfloat16: rows of a thousand classes sum to 1 within a percent")
LOSS_LOOKS = Threshold(2, "persistence: batches in which the relation holds")
_COARSE = ("bfloat16", "float16")
# Operations that make logits, or that are asked for by name.
_OTHERS = ("addmm", "mm", "bmm", "baddbmm", "linear", "convolution", "add", "sigmoid", "softmax", "logsoftmax", "relu")


def need_signal(loss: SeenLoss, name: str) -> Track:
    """Return the readings of a signal of a loss.

    Raises:
        NotMeasured: It was not measured.

    """
    track = loss.vital(name)
    if track is None:
        raise NotMeasured(f"{signals.LOSS}:vital{signals.part_of(name)}")
    return track


def bounds(track: Track) -> tuple[Values, Values]:
    """Return the minimum and the maximum at each step."""
    return track.rows[:, schema.MIN], track.rows[:, schema.MAX]


def tolerance(loss: SeenLoss) -> float:
    """Return how far a sum of probabilities may be from 1 in this precision."""
    coarse = loss.values.site.dtype in _COARSE
    return float(COARSE_SUM_ERROR if coarse else ROW_SUM_ERROR)


def are_all(track: Track, number: float, margin: float) -> bool:
    """Return whether all numbers of several readings are the given one."""
    low, high = bounds(track)
    # Values that are not finite have no bounds.
    clean = not (track.rows[:, [schema.NAN, schema.POS_INF, schema.NEG_INF]] > 0).any()
    enough = clean and len(track) >= LOSS_LOOKS
    return enough and bool(np.all(np.abs(low - number) <= margin) and np.all(np.abs(high - number) <= margin))


def may_come_from(loss: SeenLoss, *operations: str) -> bool:
    """Return whether the input of a loss may have been made by one of these operations.

    The outputs of a plain layer may look like those of a sigmoid or a ReLU for a while.
    """
    makers = {each.made_by for each in loss.case.facts.losses if each.kind == loss.kind} - {""}
    return not makers or any(maker in operations or maker not in _OTHERS for maker in makers)


def ends_in(case: Case, *kinds: str) -> str | None:
    """Return the name of the module that ran last if it is of one of these classes."""
    name = last_module(case)
    module = case.modules.get(name) if name is not None else None
    return name if module is not None and module.kind in kinds else None


@rule(
    "double_softmax",
    needs=[signals.ROW_MIN, signals.ROW_SUM, "facts.losses", "facts.order"],
    explains=[*NOT_TRAINED, "saturated_activation"],
    exact=True,
    fix="Remove {the_softmax} from the model and return logits; apply it only where you need probabilities.",
    refute="Sum the rows of the loss's input: if they do not sum to 1, this finding is wrong.",
    since=LOSS_LOOKS,
)
def double_softmax(case: Case) -> Found | None:
    """Cross entropy gets probabilities and applies a second softmax.

    Its input is never negative and sums to 1 in every row.
    """
    if (taped := broken(case, "double_softmax")) is not None:
        return taped
    for loss in seen_losses(case, "cross_entropy"):
        sums, least = need_signal(loss, signals.ROW_SUM).last(5), need_signal(loss, signals.ROW_MIN).last(5)
        if bounds(least)[0].min() >= 0 and are_all(sums, 1.0, tolerance(loss)):
            return _given_probabilities(case, loss)
    return None


def _given_probabilities(case: Case, loss: SeenLoss) -> Found:
    sums, least = need_signal(loss, signals.ROW_SUM), need_signal(loss, signals.ROW_MIN)
    classes = (loss.facts.classes if loss.facts is not None else None) or 2
    floor = math.log((math.e + classes - 1) / math.e)
    culprit = ends_in(case, "Softmax")
    off = max(abs(float(sums.rows[-1, at]) - 1) for at in (schema.MIN, schema.MAX))
    output = loss.output
    return Found(
        step=int(sums.steps[0]),
        sites=(culprit, signals.LOSS) if culprit else (signals.LOSS,),
        evidence=(
            below("largest difference from 1 of a row's sum", off, tolerance(loss), f"{sums.key} mean"),
            above("smallest input of the loss", float(bounds(least)[0].min()), 0.0, f"{least.key} min"),
            fact("loss that cannot be gone below", floor),
            fact("loss now", float("nan") if output is None else float(output.numbers()[-1])),
        ),
        cause=f"Cross entropy gets probabilities instead of logits and applies a second softmax: with {classes} "
        f"classes the loss cannot fall below {floor:.3f}.",
        values={"the_softmax": f"the softmax ({culprit})" if culprit else "the softmax"},
    )


_FLOOR = math.log(1 + 1 / math.e)  # the loss of a certain and right answer of 1


@rule(
    "double_sigmoid",
    needs=["facts.losses", "facts.order"],
    explains=[*NOT_TRAINED, "output_range_mismatch", "saturated_activation"],
    exact=True,
    fix="Remove {the_sigmoid} from the model, or use binary_cross_entropy.",
    refute="Print the inputs of the loss: if any is negative or above 1, this finding is wrong.",
    since=LOSS_LOOKS,
)
def double_sigmoid(case: Case) -> Found | None:
    """A loss with logits gets probabilities and applies a second sigmoid.

    Its inputs stay between 0 and 1.
    """
    if (taped := broken(case, "double_sigmoid")) is not None:
        return taped
    for loss in seen_losses(case, "binary_cross_entropy_with_logits", "multilabel_soft_margin_loss"):
        low, high = bounds(loss.values)
        # Exact zeros come from a ReLU, whose outputs may happen to stay below 1.
        squashed = low.min() >= 0 and high.max() <= 1 and high.max() > 0 and not (low == 0).all()
        looks = LOSS_LOOKS if ends_in(case, "Sigmoid") else 2 * LOSS_LOOKS
        if squashed and len(loss.values) >= looks and may_come_from(loss, "sigmoid", "softmax"):
            return _given_sigmoids(case, loss, float(low.min()), float(high.max()))
    return None


def _given_sigmoids(case: Case, loss: SeenLoss, low: float, high: float) -> Found:
    culprit = ends_in(case, "Sigmoid")
    return Found(
        step=int(loss.values.steps[0]),
        sites=(culprit, signals.LOSS) if culprit else (signals.LOSS,),
        evidence=(
            above("smallest input of the loss", low, 0.0, f"{loss.values.key} min"),
            below("largest input of the loss", high, 1.0, f"{loss.values.key} max"),
            fact("loss that a positive sample cannot go below", _FLOOR),
        ),
        cause=f"{loss.kind} gets probabilities instead of logits and applies a second sigmoid: no answer can exceed a "
        "probability of 0.73.",
        values={"the_sigmoid": f"the sigmoid ({culprit})" if culprit else "the sigmoid"},
    )


CLAMPED_SHARE = Threshold(0.2, "share of exact zeros among the probabilities of a fresh model; a sigmoid gives none")
LOG_PROBABILITY = Threshold(1e-3, "largest log-probability: rounding may lift that of a probability of 1 above 0")
_TORCH_SAYS = "all elements of input should be between 0 and 1"


@rule(
    "logits_into_prob_loss",
    needs=[signals.ZERO_SHARE, "facts.losses"],
    explains=[*ANY_STATISTIC, "loss_sign_flipped", "output_range_mismatch"],
    severity="critical",
    exact=True,
    fix=(
        "Use the form of the loss that takes logits (cross_entropy, binary_cross_entropy_with_logits), or apply "
        "log_softmax or sigmoid first."
    ),
    refute=(
        "Print the smallest and largest input of the loss: if log-probabilities are at most 0, or probabilities "
        "between "
        "0 and 1, this finding is wrong."
    ),
    since=0,
)
def logits_into_prob_loss(case: Case) -> Found | None:
    """A loss that takes (log-)probabilities gets something else.

    Its log-probabilities are above 0, its probabilities are clamped, or torch raised an error.
    """
    refused = any(_TORCH_SAYS in event.message for event in case.events if event.event_type == "exception")
    if refused:
        return _not_probabilities(case, "binary_cross_entropy", "probabilities", None)
    if (taped := broken(case, "logits_into_prob_loss") or overlap_of_logits(case)) is not None:
        return taped
    for loss in seen_losses(case, "nll_loss", "kl_div"):
        above_zero = bounds(loss.values)[1] > LOG_PROBABILITY
        if above_zero.sum() >= LOSS_LOOKS:
            return _not_probabilities(case, loss.kind, "log-probabilities", loss)
    return next((_clamped(loss) for loss in seen_losses(case, "binary_cross_entropy") if _is_clamped(loss)), None)


def _is_clamped(loss: SeenLoss) -> bool:
    """Return whether a fresh model gave many probabilities of exactly 0: clamped, not passed through a sigmoid."""
    zeros, (low, _) = loss.vital(signals.ZERO_SHARE), bounds(loss.values)
    if zeros is None or len(zeros) < LOSS_LOOKS or not bool((low >= 0).all()):
        return False
    return bool((zeros.numbers()[: int(LOSS_LOOKS)] >= CLAMPED_SHARE).all())


def _clamped(loss: SeenLoss) -> Found:
    zeros = loss.vital(signals.ZERO_SHARE)
    share = float("nan") if zeros is None else float(zeros.numbers()[0])
    return Found(
        step=int(loss.values.steps[0]),
        sites=(signals.LOSS,),
        evidence=(above("share of exact zeros among the first probabilities", share, CLAMPED_SHARE),),
        cause=f"{share:.0%} of the probabilities that a fresh model gives binary_cross_entropy are exactly 0: its "
        "outputs are clamped at 0, not passed through a sigmoid, and clamped outputs get no gradient.",
        fix="Use binary_cross_entropy_with_logits on the raw outputs, or sigmoid instead of clamp or relu.",
        refute="Look at what makes the outputs: if it is a sigmoid, this finding is wrong.",
    )


def _not_probabilities(case: Case, kind: str, wanted: str, loss: SeenLoss | None) -> Found:
    evidence = []
    if loss is not None:
        highest = bounds(loss.values)[1]
        evidence.append(above("largest input of the loss", float(np.max(highest)), LOG_PROBABILITY, loss.values.key))
    cures = {
        "nll_loss": "Use cross_entropy on the logits, or apply log_softmax(..., dim=1) first (not softmax).",
        "kl_div": "Apply log_softmax(..., dim=-1) to its input.",
        "binary_cross_entropy": "Use binary_cross_entropy_with_logits, or apply sigmoid first.",
    }
    return Found(
        step=case.step if loss is None else int(loss.values.steps[0]),
        sites=(signals.LOSS,),
        evidence=tuple(evidence),
        cause=f"{kind} takes {wanted}, but gets numbers that cannot be such: it can become arbitrarily low without any "
        "right answer.",
        fix=cures[kind],
    )


RELU_ZERO_SHARE = Threshold(0.2, "share of exact zeros among logits that are never negative; plain logits have none")
_TAKE_LOGITS = ("cross_entropy", "binary_cross_entropy_with_logits", "multi_margin_loss")


@rule(
    "relu_before_logits",
    needs=["facts.losses", "facts.order"],
    explains=[*NOT_TRAINED],
    exact=True,
    fix="Remove {the_relu} after the last layer.",
    refute="Print the logits: if any is negative, this finding is wrong.",
    since=LOSS_LOOKS,
)
def relu_before_logits(case: Case) -> Found | None:
    """The logits pass through a ReLU: they are never negative and often exactly zero."""
    if (taped := broken(case, "relu_before_logits")) is not None:
        return taped
    for loss in seen_losses(case, *_TAKE_LOGITS):
        recent = loss.values.last(5)
        low = bounds(recent)[0]
        zeros = float(recent.stat("zero_share").mean())
        enough = len(recent) >= LOSS_LOOKS and bool((low == 0).all())
        if enough and zeros >= RELU_ZERO_SHARE and may_come_from(loss, "relu"):
            return _rectified(case, loss, zeros)
    return None


def _rectified(case: Case, loss: SeenLoss, zeros: float) -> Found:
    culprit = ends_in(case, "ReLU", "ReLU6")
    return Found(
        step=int(loss.values.steps[0]),
        sites=(culprit, signals.LOSS) if culprit else (signals.LOSS,),
        evidence=(
            above("share of logits that are exactly 0", zeros, RELU_ZERO_SHARE, f"{loss.values.key} zero_share"),
            below("smallest logit", 0.0, 0.0, f"{loss.values.key} min"),
        ),
        cause=f"The logits pass through a ReLU: {zeros:.0%} of them are exactly 0, so no class can become unlikely, "
        "and "
        "zeros pass no gradient.",
        values={"the_relu": f"the ReLU ({culprit})" if culprit else "the ReLU"},
    )


_OVER_CLASSES = ("cross_entropy", "nll_loss", "mse_loss", "binary_cross_entropy", "kl_div")


@rule(
    "wrong_dim_softmax",
    needs=[
        signals.COLUMN_LOG_Z,
        signals.COLUMN_SUM,
        signals.LOG_Z,
        signals.ROW_SUM,
        signals.SAMPLE_SPREAD,
        "facts.softmaxes",
        "facts.losses",
        "facts.order",
    ],
    explains=[*NOT_TRAINED],
    severity="critical",
    exact=True,
    fix="Write dim=1 (or dim=-1) in softmax or log_softmax; dim=0 is the batch.",
    refute="Sum the result over classes: if each row sums to 1 (or has a log-sum of 0), this finding is wrong.",
)
def wrong_dim_softmax(case: Case) -> Found | None:
    """A softmax runs over the wrong dimension.

    Its result is summed over another dimension, or the input of a loss sums to 1 over the batch instead of the classes.
    """
    if (taped := wrong_axis(case)) is not None:
        return taped
    crossed = next((each for each in case.facts.softmaxes if _is_crossed(each)), None)
    if crossed is not None:
        return _crossed(crossed)
    for loss in seen_losses(case, *_OVER_CLASSES):
        pairs = [(signals.COLUMN_SUM, signals.ROW_SUM, 1.0)]
        if loss.kind in ("nll_loss", "cross_entropy"):
            pairs.append((signals.COLUMN_LOG_Z, signals.LOG_Z, 0.0))
        for down, across, number in pairs:
            columns, rows = loss.vital(down), loss.vital(across)
            if columns is None or rows is None or columns.rows[-1, schema.COUNT] < 2:
                continue
            margin = tolerance(loss)
            if are_all(columns.last(5), number, margin) and not are_all(rows.last(5), number, margin):
                return _over_the_batch(case, loss, columns, rows, number)
    need_signal(seen_losses(case)[0], signals.SAMPLE_SPREAD)
    return None


def _is_crossed(softmax: SoftmaxFacts) -> bool:
    """Return whether a softmax runs over one dimension and is used along another.

    This is also true for soft clustering, where each sample is divided among a few centres. Weights count only if
    samples of the batch compete, or in self-attention, where the two dimensions are equal and one was meant.
    """
    shape, dim, summed = softmax.shape, softmax.dim, softmax.summed
    if dim == summed or not (max(dim, summed) < len(shape) and shape[dim] > 1):
        return False
    if softmax.used == "likelihood":
        return True
    last = {len(shape) - 2, len(shape) - 1}
    square = summed in last and (dim in last or len(shape) >= 4) and shape[-1] == shape[-2]
    return len(shape) >= 3 and (dim == 0 or square)


def _crossed(softmax: SoftmaxFacts) -> Found:
    is_loss = softmax.used == "likelihood"
    name = "log_softmax" if softmax.logarithm else "softmax"
    where = softmax.module or ("" if is_loss else "(model)")
    used = "the classes of the loss are" if is_loss else "its result is summed over"
    return Found(
        step=1,
        sites=tuple(site for site in (where, signals.LOSS if is_loss else "") if site),
        evidence=(
            fact(f"dimension of {softmax.shape} that {name} runs over", softmax.dim),
            fact(f"dimension that {used}", softmax.summed),
        ),
        cause=f"A {name} of {softmax.shape} runs over dimension {softmax.dim}, but {used} dimension {softmax.summed}: "
        + ("the probabilities of a sample do not sum to 1." if is_loss else "its weights do not sum to 1."),
        fix=f"Write dim={softmax.summed - len(softmax.shape)} in that {name}"
        + (f" (in {where})." if where and where != "(model)" else "."),
        refute=f"Sum its result over dimension {softmax.summed}: if all sums are 1, this finding is wrong.",
    )


def _over_the_batch(case: Case, loss: SeenLoss, columns: Track, rows: Track, number: float) -> Found:
    culprit = ends_in(case, "Softmax", "LogSoftmax")
    off = max(abs(float(columns.rows[-1, at]) - number) for at in (schema.MIN, schema.MAX))
    what = "sum" if number else "log-sum"
    return Found(
        step=int(columns.steps[0]),
        sites=(culprit, signals.LOSS) if culprit else (signals.LOSS,),
        evidence=(
            below(
                f"largest difference from {number:g} of a class's {what} over the batch",
                off,
                tolerance(loss),
                columns.key,
            ),
            fact(f"mean {what} over the classes of a sample", float(rows.numbers()[-1]), f"{rows.key} mean"),
        ),
        cause="The softmax runs over the samples of the batch instead of the classes: the outputs of one class sum to "
        "1 over the batch, and samples compete with each other.",
    )


RANGE_MARGIN = Threshold(0.02, "distance of a target beyond the range over the spread of targets: more than rounding")
_REGRESSIONS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
_RANGES = {
    "Sigmoid": (0.0, 1.0),
    "Hardsigmoid": (0.0, 1.0),
    "Softmax": (0.0, 1.0),
    "Tanh": (-1.0, 1.0),
    "Hardtanh": (-1.0, 1.0),
    "Softsign": (-1.0, 1.0),
    "ReLU": (0.0, float("inf")),
    "Softplus": (0.0, float("inf")),
}


@rule(
    "output_range_mismatch",
    needs=["facts.losses", "facts.order"],
    explains=[*NOT_TRAINED, "saturated_activation"],
    exact=True,
    fix="End in a linear layer without {the_activation}, or scale the targets into its range.",
    refute="Print the targets: if all lie within the range of the last activation, this finding is wrong.",
    since=LOSS_LOOKS,
)
def output_range_mismatch(case: Case) -> Found | None:
    """Targets lie outside the range of the last activation."""
    if (taped := broken(case, "output_range_mismatch") or samples_out_of_reach(case)) is not None:
        return taped
    for loss in seen_losses(case, *_REGRESSIONS):
        target = loss.target
        found = _range_of(case, loss)
        if target is None or found is None or len(target) < LOSS_LOOKS:
            continue
        culprit, (low, high) = found
        recent = target.last(5)
        least, most = bounds(recent)
        spread = float(np.median(recent.stat("std")))
        outside = np.maximum(low - least, most - high)
        if spread > 0 and bool((outside > RANGE_MARGIN * spread).all()) and _matters(recent.rows, low, high):
            return _out_of_reach(
                culprit, (low, high), float(least.min()), float(most.max()), float(outside.max() / spread)
            )
    return None


def _range_of(case: Case, loss: SeenLoss) -> tuple[str, tuple[float, float]] | None:
    """Return the last module and its range if the loss gets its output."""
    name = last_module(case)
    module = case.modules.get(name or "")
    if name is None or module is None or module.kind not in _RANGES:
        return None
    output = case.track(f"{name}:output")
    if output is None or not np.array_equal(
        output.rows[-1, [schema.MIN, schema.MAX]], loss.values.rows[-1, [schema.MIN, schema.MAX]]
    ):
        return None
    return name, _RANGES[module.kind]


def _matters(rows: Rows, low: float, high: float) -> bool:
    """Return whether more than single outliers lie outside: the mean is within two spreads of an end, or beyond it."""
    means, spreads = rows[:, schema.MEAN], np.sqrt(rows[:, schema.M2] / np.maximum(rows[:, schema.COUNT], 1))
    return bool(np.median(np.minimum(means - low, high - means) - 2 * spreads) < 0)


def _out_of_reach(culprit: str, reach: tuple[float, float], least: float, most: float, outside: float) -> Found:
    return Found(
        step=1,
        sites=(culprit, signals.LOSS),
        evidence=(
            above("distance of targets beyond the range, in spreads of the target", outside, RANGE_MARGIN),
            fact("smallest target", least, "loss_fn:input.target min"),
            fact("largest target", most, "loss_fn:input.target max"),
        ),
        cause=f"The model ends in {culprit}, whose outputs lie between {reach[0]:g} and {reach[1]:g}, but targets run "
        f"from {least:.3g} to {most:.3g}: it can never reach some of them.",
        values={"the_activation": culprit},
    )


_ELEMENTWISE = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "gaussian_nll_loss", "poisson_nll_loss")


@rule(
    "broadcast_loss",
    needs=["facts.columns", "facts.losses"],
    explains=[*NOT_TRAINED],
    severity="critical",
    exact=True,
    fix="Give both the same shape: output.squeeze(1), or target.unsqueeze(1).",
    refute="Compare output.shape and target.shape where the loss is called: if they are equal, this finding is wrong.",
)
def broadcast_loss(case: Case) -> Found | None:
    """Output and target are broadcast against each other, so that all pairs are compared."""
    if (taped := wrongly_broadcast(case)) is not None:
        return taped
    if case.facts.columns:
        return _column_meets_row(case.facts.columns[0])
    if not case.facts.losses:
        raise NotMeasured("a loss function of torch.nn.functional")
    for loss in case.facts.losses:
        if loss.kind not in _ELEMENTWISE or loss.input_shape == loss.target_shape:
            continue
        try:
            whole = np.broadcast_shapes(loss.input_shape, loss.target_shape)
        except ValueError:
            continue
        largest = max(prod(loss.input_shape), prod(loss.target_shape))
        if prod(whole) > largest:
            return Found(
                step=1,
                sites=(signals.LOSS,),
                evidence=(
                    above("pairs that are compared", prod(whole), largest),
                    fact("numbers in the output", prod(loss.input_shape)),
                    fact("numbers in the target", prod(loss.target_shape)),
                ),
                cause=f"{loss.kind} compares an output of shape {loss.input_shape} with a target of shape "
                f"{loss.target_shape}: they are broadcast to {whole}, and every output is compared with every target. "
                "The best the model can do is to predict the mean of all targets.",
            )
    return None


def _column_meets_row(met: ColumnFacts) -> Found:
    count = met.column[0]
    return Found(
        step=1,
        sites=(signals.LOSS,),
        evidence=(
            above("pairs that are made", prod(met.result), count),
            fact("samples in the batch", count),
        ),
        cause=f"Within the loss a column of shape {met.column} meets a row of shape ({count},) ({met.operation}): both "
        f"are broadcast to {met.result}, and each sample is combined with every other.",
        fix="Give both the same shape: squeeze(1) the column, or unsqueeze(1) the row.",
        refute="Print the shapes on the line of that operation: if they are equal, this finding is wrong.",
    )
