"""A softmax over another dimension than the one its result is used along."""

from __future__ import annotations

from sonde import vitals
from sonde.diagnosis.case import Case
from sonde.diagnosis.outputs import are_all, ends_in, need_sign, tolerance
from sonde.diagnosis.rule import Rule, below, fact
from sonde.diagnosis.seen_loss import SeenLoss, seen_losses
from sonde.diagnosis.track import Track
from sonde.facts import SoftmaxFacts
from sonde.records import Finding

_LOSSES = ("cross_entropy", "nll_loss", "mse_loss", "binary_cross_entropy", "kl_div")


def check(case: Case) -> Finding | None:
    """Find a softmax whose result is summed over another dimension, or a loss given what sums to 1 over the batch."""
    crossed = next((each for each in case.facts.softmaxes if _is_crossed(each)), None)
    if crossed is not None:
        return _crossed(case, crossed)
    for loss in seen_losses(case, *_LOSSES):
        pairs = [(vitals.COLUMN_SUM, vitals.ROW_SUM, 1.0)]
        if loss.kind in ("nll_loss", "cross_entropy"):
            pairs.append((vitals.COLUMN_LOG_Z, vitals.LOG_Z, 0.0))
        for down, across, number in pairs:
            columns, rows = loss.vital(down), loss.vital(across)
            if columns is None or rows is None or columns.rows[-1, 1] < 2:
                continue
            margin = tolerance(loss)
            if are_all(columns.last(5), number, margin) and not are_all(rows.last(5), number, margin):
                return _finding(case, loss, columns, rows, number)
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


def _crossed(case: Case, softmax: SoftmaxFacts) -> Finding:
    is_loss = softmax.used == "likelihood"
    name = "log_softmax" if softmax.logarithm else "softmax"
    where = softmax.module or ("" if is_loss else "(model)")
    used = "the classes of the loss are" if is_loss else "its result is summed over"
    return RULE.finding(
        case,
        "critical",
        0.95,
        sites=tuple(site for site in (where, vitals.LOSS if is_loss else "") if site),
        step=1,
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


def _finding(case: Case, loss: SeenLoss, columns: Track, rows: Track, number: float) -> Finding:
    culprit = ends_in(case, "Softmax", "LogSoftmax")
    off = float(max(abs(columns.rows[-1, 7] - number), abs(columns.rows[-1, 8] - number)))
    what = "sum" if number else "log-sum"
    return RULE.finding(
        case,
        "critical",
        0.97,
        sites=(culprit, vitals.LOSS) if culprit else (vitals.LOSS,),
        step=int(columns.steps[0]),
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
        fix="Write dim=1 (or dim=-1) in softmax / log_softmax; dim=0 is the batch.",
        refute="If each row of what the loss is given sums to 1, or has a log-sum of 0, it is wrong.",
    )


RULE = Rule(kind="wrong_dim_softmax", check=check, since=1)
