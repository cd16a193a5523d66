"""Rules about what a loss function is given: logits, probabilities, shapes and ranges."""

from __future__ import annotations

import math
from math import prod

import numpy as np

from sonde import schema, vitals
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.ownership import last_module
from sonde.diagnosis.rule import Found, Threshold, above, below, fact, rule
from sonde.diagnosis.seen_loss import SeenLoss, seen_losses
from sonde.diagnosis.symptoms import ANY_STATISTIC, NOT_TRAINED
from sonde.diagnosis.track import Track, Values
from sonde.facts import ColumnFacts, SoftmaxFacts
from sonde.schema import Rows

COARSE_SUM_ERROR = Threshold(2e-2, "bfloat16 has eight bits: rows of a thousand classes sum to 1 within a percent")
ROW_SUM_ERROR = Threshold(1e-3, "float32 softmax rows sum to 1 within 1e-6; 1e-3 leaves room for large vocabularies")
LOSS_LOOKS = Threshold(2, "persistence: batches in which the relation holds")


_COARSE = ("bfloat16", "float16")


# What is known to be neither a squashing nor a rectifying operation, unless it is asked for.
_OTHERS = ("addmm", "mm", "bmm", "baddbmm", "linear", "convolution", "add", "sigmoid", "softmax", "logsoftmax", "relu")


def need_sign(loss: SeenLoss, name: str) -> Track:
    """Return the last readings of a vital sign of a loss.

    Raises:
        NotMeasured: It was not measured.

    """
    track = loss.vital(name)
    if track is None:
        raise NotMeasured(f"{vitals.LOSS}:vital{vitals.part_of(name)}")
    return track


def bounds(track: Track) -> tuple[Values, Values]:
    """Return the smallest and the largest number at each step."""
    return track.rows[:, schema.MIN], track.rows[:, schema.MAX]


def tolerance(loss: SeenLoss) -> float:
    """Return how far a sum of probabilities may be from 1 in the precision at hand."""
    coarse = loss.values.site.dtype in _COARSE
    return float(COARSE_SUM_ERROR if coarse else ROW_SUM_ERROR)


def are_all(track: Track, number: float, margin: float) -> bool:
    """Say whether all numbers of several readings are the given one."""
    low, high = bounds(track)
    # Of what is not finite there are no bounds.
    clean = not (track.rows[:, [schema.NAN, schema.POS_INF, schema.NEG_INF]] > 0).any()
    enough = clean and len(track) >= LOSS_LOOKS
    return enough and bool(np.all(np.abs(low - number) <= margin) and np.all(np.abs(high - number) <= margin))


def may_come_from(loss: SeenLoss, *operations: str) -> bool:
    """Say whether what a loss was given was returned by one of these operations, as far as is known.

    Numbers of a plain layer may happen to look like those of a sigmoid or a rectifier for a while.
    """
    makers = {each.made_by for each in loss.case.facts.losses if each.kind == loss.kind} - {""}
    return not makers or any(maker in operations or maker not in _OTHERS for maker in makers)


def ends_in(case: Case, *kinds: str) -> str | None:
    """Return the module that ran last, if it is of one of these classes."""
    name = last_module(case)
    module = case.modules.get(name) if name is not None else None
    return name if module is not None and module.kind in kinds else None


@rule(
    "double_softmax",
    needs=[vitals.ROW_MIN, vitals.ROW_SUM, "facts.losses"],
    explains=[*NOT_TRAINED, "saturated_activation"],
    exact=True,
    fix="Remove {the_softmax} from the model and return logits; apply it only where you need probabilities.",
    refute="If the rows of what the loss is given do not sum to 1, it is wrong.",
    since=2,
)
def double_softmax(case: Case) -> Found | None:
    """Cross entropy is given probabilities and takes a second softmax.

    Find cross entropy whose input is never negative and sums to 1 in every row.
    """
    for loss in seen_losses(case, "cross_entropy"):
        sums, least = need_sign(loss, vitals.ROW_SUM).last(5), need_sign(loss, vitals.ROW_MIN).last(5)
        if bounds(least)[0].min() >= 0 and are_all(sums, 1.0, tolerance(loss)):
            return _finding_of_double_softmax(case, loss)
    return None


def _finding_of_double_softmax(case: Case, loss: SeenLoss) -> Found:
    sums, least = need_sign(loss, vitals.ROW_SUM), need_sign(loss, vitals.ROW_MIN)
    classes = (loss.facts.classes if loss.facts is not None else None) or 2
    floor = math.log((math.e + classes - 1) / math.e)
    culprit = ends_in(case, "Softmax")
    off = max(abs(float(sums.rows[-1, at]) - 1) for at in (7, 8))
    output = loss.output
    return Found(
        step=int(sums.steps[0]),
        sites=(culprit, vitals.LOSS) if culprit else (vitals.LOSS,),
        evidence=(
            below("largest difference from 1 of a row's sum", off, tolerance(loss), f"{sums.key} mean"),
            above("smallest number the loss was given", float(bounds(least)[0].min()), 0.0, f"{least.key} min"),
            fact("loss that cannot be gone below", floor),
            fact("loss now", float("nan") if output is None else float(output.numbers()[-1])),
        ),
        cause=f"Cross entropy is given probabilities instead of logits and takes a second softmax: with {classes} "
        f"classes the loss cannot fall below {floor:.3f}.",
        values={"the_softmax": f"the softmax ({culprit})" if culprit else "the softmax"},
    )


_FLOOR = 0.3133  # ln(1 + 1/e): the loss of a sure and right answer of 1


@rule(
    "double_sigmoid",
    needs=["facts.losses"],
    explains=[*NOT_TRAINED, "output_range_mismatch", "saturated_activation"],
    exact=True,
    fix="Remove {the_sigmoid} from the model, or use binary_cross_entropy.",
    refute="If what the loss is given is ever negative or above 1, it is wrong.",
    since=2,
)
def double_sigmoid(case: Case) -> Found | None:
    """A loss with logits is given probabilities and takes a second sigmoid.

    Find binary cross entropy with logits whose input stays between 0 and 1.
    """
    for loss in seen_losses(case, "binary_cross_entropy_with_logits", "multilabel_soft_margin_loss"):
        low, high = bounds(loss.values)
        # Exact zeros come from a rectifier, whose outputs may happen to stay below 1.
        squashed = low.min() >= 0 and high.max() <= 1 and high.max() > 0 and not (low == 0).all()
        looks = LOSS_LOOKS if ends_in(case, "Sigmoid") else 2 * LOSS_LOOKS
        if squashed and len(loss.values) >= looks and may_come_from(loss, "sigmoid", "softmax"):
            return _finding_of_double_sigmoid(case, loss, float(low.min()), float(high.max()))
    return None


def _finding_of_double_sigmoid(case: Case, loss: SeenLoss, low: float, high: float) -> Found:
    culprit = ends_in(case, "Sigmoid")
    return Found(
        step=int(loss.values.steps[0]),
        sites=(culprit, vitals.LOSS) if culprit else (vitals.LOSS,),
        evidence=(
            above("smallest number the loss was given", low, 0.0, f"{loss.values.key} min"),
            below("largest number the loss was given", high, 1.0, f"{loss.values.key} max"),
            fact("loss that a positive sample cannot go below", _FLOOR),
        ),
        cause=f"{loss.kind} is given probabilities instead of logits and takes a second sigmoid: no answer can be "
        "surer than 0.73.",
        values={"the_sigmoid": f"the sigmoid ({culprit})" if culprit else "the sigmoid"},
    )


CLAMPED_SHARE = Threshold(0.2, "exact zeros among the probabilities of a fresh model; a sigmoid gives none")


_TORCH_SAYS = "all elements of input should be between 0 and 1"


# Rounding may lift the logarithm of a probability of 1 just above 0.
_ZERO = 1e-3


@rule(
    "logits_into_prob_loss",
    needs=[vitals.ZERO_SHARE, "facts.losses"],
    explains=[*ANY_STATISTIC, "loss_sign_flipped"],
    severity="critical",
    exact=True,
    fix="Use binary_cross_entropy_with_logits on the raw outputs, or sigmoid instead of clamp or relu.",
    refute="Print the outputs before the loss: if a sigmoid made them, it is wrong.",
    since=0,
)
def logits_into_prob_loss(case: Case) -> Found | None:
    """A loss that wants (log-)probabilities is given something else.

    Find log-probabilities above 0, and binary cross entropy that torch refused.
    """
    refused = any(_TORCH_SAYS in event.message for event in case.events if event.event_type == "exception")
    if refused:
        return _finding_of_logits_into_prob_loss(case, "binary_cross_entropy", "probabilities", None)
    for loss in seen_losses(case, "nll_loss", "kl_div"):
        highest = bounds(loss.values)[1]
        above_zero = highest > _ZERO
        if above_zero.sum() >= LOSS_LOOKS:
            return _finding_of_logits_into_prob_loss(case, loss.kind, "logarithms of probabilities", loss)
    return next((_clamped(case, loss) for loss in seen_losses(case, "binary_cross_entropy") if _is_clamped(loss)), None)


def _is_clamped(loss: SeenLoss) -> bool:
    """Say whether a fresh model gave many probabilities of exactly 0: numbers that were cut off, not squashed."""
    zeros, (low, _) = loss.vital(vitals.ZERO_SHARE), bounds(loss.values)
    if zeros is None or len(zeros) < LOSS_LOOKS or not bool((low >= 0).all()):
        return False
    return bool((zeros.numbers()[: int(LOSS_LOOKS)] >= CLAMPED_SHARE).all())


def _clamped(case: Case, loss: SeenLoss) -> Found:
    zeros = loss.vital(vitals.ZERO_SHARE)
    share = float("nan") if zeros is None else float(zeros.numbers()[0])
    return Found(
        step=int(loss.values.steps[0]),
        sites=(vitals.LOSS,),
        evidence=(above("share of exact zeros among the first probabilities", share, CLAMPED_SHARE),),
        cause=f"{share:.0%} of the probabilities that a fresh model gives binary_cross_entropy are exactly 0: its "
        "outputs are cut off at 0, not passed through a sigmoid. What is cut off gets no gradient.",
    )


def _finding_of_logits_into_prob_loss(case: Case, kind: str, wanted: str, loss: SeenLoss | None) -> Found:
    evidence = []
    if loss is not None:
        highest = bounds(loss.values)[1]
        evidence.append(above("largest number the loss was given", float(np.max(highest)), _ZERO, loss.values.key))
    cures = {
        "nll_loss": "Use cross_entropy on the logits, or apply log_softmax(..., dim=1) first (not softmax).",
        "kl_div": "Apply log_softmax(..., dim=-1) to its input.",
        "binary_cross_entropy": "Use binary_cross_entropy_with_logits, or apply sigmoid first.",
    }
    return Found(
        step=case.step if loss is None else int(loss.values.steps[0]),
        sites=(vitals.LOSS,),
        evidence=tuple(evidence),
        cause=f"{kind} wants {wanted}, but is given numbers that cannot be such: it can be made as low as one likes "
        "without getting anything right.",
        fix=cures[kind],
        refute="Print the smallest and largest of what the loss is given: log-probabilities are never above 0, "
        "probabilities lie between 0 and 1.",
    )


RELU_ZERO_SHARE = Threshold(0.2, "exact zeros among logits that are never negative; real logits have none")


_RELU_BEFORE_LOGITS_LOSSES = ("cross_entropy", "binary_cross_entropy_with_logits", "multi_margin_loss")


@rule(
    "relu_before_logits",
    needs=["facts.losses"],
    explains=[*NOT_TRAINED],
    exact=True,
    fix="Remove {the_relu} behind the last layer.",
    refute="If any logit is negative, it is wrong.",
    since=2,
)
def relu_before_logits(case: Case) -> Found | None:
    """The logits pass through a rectifier.

    Find logits that are never negative and often exactly zero.
    """
    for loss in seen_losses(case, *_RELU_BEFORE_LOGITS_LOSSES):
        recent = loss.values.last(5)
        low = bounds(recent)[0]
        zeros = float(recent.stat("zero_share").mean())
        enough = len(recent) >= LOSS_LOOKS and bool((low == 0).all())
        if enough and zeros >= RELU_ZERO_SHARE and may_come_from(loss, "relu"):
            return _finding_of_relu_before_logits(case, loss, zeros)
    return None


def _finding_of_relu_before_logits(case: Case, loss: SeenLoss, zeros: float) -> Found:
    culprit = ends_in(case, "ReLU", "ReLU6")
    return Found(
        step=int(loss.values.steps[0]),
        sites=(culprit, vitals.LOSS) if culprit else (vitals.LOSS,),
        evidence=(
            above("share of logits that are exactly 0", zeros, RELU_ZERO_SHARE, f"{loss.values.key} zero_share"),
            below("smallest logit", 0.0, 0.0, f"{loss.values.key} min"),
        ),
        cause=f"The logits pass through a rectifier: {zeros:.0%} of them are exactly 0, so no class can be said to be "
        "unlikely, and those zeros pass no gradient.",
        values={"the_relu": f"the ReLU ({culprit})" if culprit else "the ReLU"},
    )


_WRONG_DIM_SOFTMAX_LOSSES = ("cross_entropy", "nll_loss", "mse_loss", "binary_cross_entropy", "kl_div")


@rule(
    "wrong_dim_softmax",
    needs=[
        vitals.COLUMN_LOG_Z,
        vitals.COLUMN_SUM,
        vitals.LOG_Z,
        vitals.ROW_SUM,
        vitals.SAMPLE_SPREAD,
        "facts.softmaxes",
        "facts.losses",
    ],
    explains=[*NOT_TRAINED],
    severity="critical",
    exact=True,
    fix="Write dim=1 (or dim=-1) in softmax / log_softmax; dim=0 is the batch.",
    refute="If each row of what the loss is given sums to 1, or has a log-sum of 0, it is wrong.",
    since=1,
)
def wrong_dim_softmax(case: Case) -> Found | None:
    """A softmax runs over another dimension than its result is used along.

    Find a softmax whose result is summed over another dimension, or a loss given what sums to 1 over the batch.
    """
    crossed = next((each for each in case.facts.softmaxes if _is_crossed(each)), None)
    if crossed is not None:
        return _crossed(case, crossed)
    for loss in seen_losses(case, *_WRONG_DIM_SOFTMAX_LOSSES):
        pairs = [(vitals.COLUMN_SUM, vitals.ROW_SUM, 1.0)]
        if loss.kind in ("nll_loss", "cross_entropy"):
            pairs.append((vitals.COLUMN_LOG_Z, vitals.LOG_Z, 0.0))
        for down, across, number in pairs:
            columns, rows = loss.vital(down), loss.vital(across)
            if columns is None or rows is None or columns.rows[-1, 1] < 2:
                continue
            margin = tolerance(loss)
            if are_all(columns.last(5), number, margin) and not are_all(rows.last(5), number, margin):
                return _finding_of_wrong_dim_softmax(case, loss, columns, rows, number)
    need_sign(seen_losses(case)[0], vitals.SAMPLE_SPREAD)
    return None


def _is_crossed(softmax: SoftmaxFacts) -> bool:
    """Say whether a softmax runs over one dimension and is used along another.

    That holds for some clusterings too, where each sample is shared out among a few centres. So weights count only if
    samples of the batch compete, or if it might as well be the other of two equal dimensions, as in self-attention, or
    if in self-attention neither of the two is weighed, but the heads.
    """
    shape, dim, summed = softmax.shape, softmax.dim, softmax.summed
    if dim == summed or not (max(dim, summed) < len(shape) and shape[dim] > 1):
        return False
    if softmax.used == "likelihood":
        return True
    last = {len(shape) - 2, len(shape) - 1}
    square = summed in last and (dim in last or len(shape) >= 4) and shape[-1] == shape[-2]
    return len(shape) >= 3 and (dim == 0 or square)


def _crossed(case: Case, softmax: SoftmaxFacts) -> Found:
    is_loss = softmax.used == "likelihood"
    name = "log_softmax" if softmax.logarithm else "softmax"
    where = softmax.module or ("" if is_loss else "(model)")
    used = "the classes of the loss are" if is_loss else "its result is summed over"
    return Found(
        step=1,
        sites=tuple(site for site in (where, vitals.LOSS if is_loss else "") if site),
        evidence=(
            fact(f"dimension of {softmax.shape} that {name} runs over", softmax.dim),
            fact(f"dimension that {used}", softmax.summed),
        ),
        cause=f"A {name} of {softmax.shape} runs over dimension {softmax.dim}, but {used} dimension {softmax.summed}: "
        + (
            "the probabilities of a sample do not sum to 1." if is_loss else "what is mixed is not weighed to sum to 1."
        ),
        fix=f"Write dim={softmax.summed - len(softmax.shape)} in that {name}"
        + (f" (in {where})." if where and where != "(model)" else "."),
        refute=f"Print what it returns, summed over dimension {softmax.summed}: ones refute it.",
    )


def _finding_of_wrong_dim_softmax(case: Case, loss: SeenLoss, columns: Track, rows: Track, number: float) -> Found:
    culprit = ends_in(case, "Softmax", "LogSoftmax")
    off = float(max(abs(columns.rows[-1, 7] - number), abs(columns.rows[-1, 8] - number)))
    what = "sum" if number else "log-sum"
    return Found(
        step=int(columns.steps[0]),
        sites=(culprit, vitals.LOSS) if culprit else (vitals.LOSS,),
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


RANGE_MARGIN = Threshold(0.02, "share of the target's spread that may lie outside the range of the output")


_OUTPUT_RANGE_MISMATCH_LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")


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
    needs=["facts.losses"],
    explains=[*NOT_TRAINED, "saturated_activation"],
    exact=True,
    fix="End in a linear layer without {the_activation}, or scale the targets into its range.",
    refute="If all targets lie within the range of the last activation, it is wrong.",
    since=2,
)
def output_range_mismatch(case: Case) -> Found | None:
    """Targets lie where the last activation can never reach.

    Find a bounded activation at the end of the model, and targets outside its range in several batches.
    """
    for loss in seen_losses(case, *_OUTPUT_RANGE_MISMATCH_LOSSES):
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
            return _finding_of_output_range_mismatch(
                case, culprit, (low, high), float(least.min()), float(most.max()), float(outside.max() / spread)
            )
    return None


def _range_of(case: Case, loss: SeenLoss) -> tuple[str, tuple[float, float]] | None:
    """Return the last module and its range, if what it returns is what the loss is given."""
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
    """Say whether more than single outliers lie outside: the mean is within a spread of an end, or beyond it."""
    means, spreads = rows[:, schema.MEAN], np.sqrt(rows[:, schema.M2] / np.maximum(rows[:, schema.COUNT], 1))
    return bool(np.median(np.minimum(means - low, high - means) - 2 * spreads) < 0)


def _finding_of_output_range_mismatch(
    case: Case, culprit: str, reach: tuple[float, float], least: float, most: float, outside: float
) -> Found:
    return Found(
        step=1,
        sites=(culprit, vitals.LOSS),
        evidence=(
            above("distance of targets beyond the range, in spreads of the target", outside, RANGE_MARGIN),
            fact("smallest target", least, "loss_fn:input.target min"),
            fact("largest target", most, "loss_fn:input.target max"),
        ),
        cause=f"The model ends in {culprit}, whose outputs lie between {reach[0]:g} and {reach[1]:g}, but targets run "
        f"from {least:.3g} to {most:.3g}: some can never be reached.",
        values={"the_activation": culprit},
    )


_ELEMENTWISE = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "gaussian_nll_loss", "poisson_nll_loss")


@rule(
    "broadcast_loss",
    needs=["facts.columns", "facts.losses"],
    explains=[*NOT_TRAINED],
    severity="critical",
    exact=True,
    fix="Give both the same shape: squeeze(1) the column, or unsqueeze(1) the row.",
    refute="Print the shapes on the line of that operation: if they are equal, it is wrong.",
    since=1,
)
def broadcast_loss(case: Case) -> Found | None:
    """Output and target have shapes that are blown up to fit each other.

    Find an input and a target that are compared in all pairs, as (N, 1) and (N,) are.
    """
    if case.facts.columns:
        return _met_a_row(case, case.facts.columns[0])
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
                sites=(vitals.LOSS,),
                evidence=(
                    above("pairs that are compared", prod(whole), largest),
                    fact("numbers in the output", prod(loss.input_shape)),
                    fact("numbers in the target", prod(loss.target_shape)),
                ),
                cause=f"{loss.kind} compares an output of shape {loss.input_shape} with a target of shape "
                f"{loss.target_shape}: they are blown up to {whole}, and every output is held against every target. "
                "The best the model can do is the mean of all targets.",
                fix="Give both the same shape: output.squeeze(1), or target.unsqueeze(1).",
                refute="If output.shape == target.shape where the loss is called, it is wrong.",
            )
    return None


def _met_a_row(case: Case, met: ColumnFacts) -> Found:
    count = met.column[0]
    return Found(
        step=1,
        sites=(vitals.LOSS,),
        evidence=(
            above("pairs that are made", prod(met.result), count),
            fact("samples in the batch", count),
        ),
        cause=f"Within the loss a column of shape {met.column} meets a row of shape ({count},) ({met.operation}): both "
        f"are blown up to {met.result}, and what belongs to one sample is combined with every other.",
    )
