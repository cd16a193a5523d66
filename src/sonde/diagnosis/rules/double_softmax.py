"""A softmax before a loss that takes one itself."""

from __future__ import annotations

import math

from sonde import vitals
from sonde.diagnosis.case import Case
from sonde.diagnosis.outputs import are_all, bounds, ends_in, need_sign, tolerance
from sonde.diagnosis.rule import Rule, above, below, fact
from sonde.diagnosis.seen_loss import SeenLoss, seen_losses
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find cross entropy whose input is never negative and sums to 1 in every row."""
    for loss in seen_losses(case, "cross_entropy"):
        sums, least = need_sign(loss, vitals.ROW_SUM).last(5), need_sign(loss, vitals.ROW_MIN).last(5)
        if bounds(least)[0].min() >= 0 and are_all(sums, 1.0, tolerance(loss)):
            return _finding(case, loss)
    return None


def _finding(case: Case, loss: SeenLoss) -> Finding:
    sums, least = need_sign(loss, vitals.ROW_SUM), need_sign(loss, vitals.ROW_MIN)
    classes = (loss.facts.classes if loss.facts is not None else None) or 2
    floor = math.log((math.e + classes - 1) / math.e)
    culprit = ends_in(case, "Softmax")
    off = max(abs(float(sums.rows[-1, at]) - 1) for at in (7, 8))
    output = loss.output
    return RULE.finding(
        case,
        "warning",
        0.98,
        sites=(culprit, vitals.LOSS) if culprit else (vitals.LOSS,),
        step=int(sums.steps[0]),
        evidence=(
            below("largest difference from 1 of a row's sum", off, tolerance(loss), f"{sums.key} mean"),
            above("smallest number the loss was given", float(bounds(least)[0].min()), 0.0, f"{least.key} min"),
            fact("loss that cannot be gone below", floor),
            fact("loss now", float("nan") if output is None else float(output.numbers()[-1])),
        ),
        cause=f"Cross entropy is given probabilities instead of logits and takes a second softmax: with {classes} "
        f"classes the loss cannot fall below {floor:.3f}.",
        fix=f"Remove the softmax{f' ({culprit})' if culprit else ''} from the model and return logits; apply it only "
        "where you need probabilities.",
        refute="If the rows of what the loss is given do not sum to 1, it is wrong.",
    )


RULE = Rule(kind="double_softmax", check=check, since=2)
