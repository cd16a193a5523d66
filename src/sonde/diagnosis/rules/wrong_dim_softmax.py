"""A softmax over the samples of a batch instead of the classes."""

from __future__ import annotations

from sonde import vitals
from sonde.diagnosis.case import Case
from sonde.diagnosis.outputs import are_all, ends_in, need_sign, tolerance
from sonde.diagnosis.rule import Rule, below, fact
from sonde.diagnosis.seen_loss import SeenLoss, seen_losses
from sonde.diagnosis.track import Track
from sonde.records import Finding

_LOSSES = ("cross_entropy", "nll_loss", "mse_loss", "binary_cross_entropy", "kl_div")


def check(case: Case) -> Finding | None:
    """Find a loss whose input sums to 1 over the batch, and not over the classes; the same for logarithms."""
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


RULE = Rule(kind="wrong_dim_softmax", check=check, since=2)
