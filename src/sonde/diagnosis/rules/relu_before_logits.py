"""A rectifier on the logits."""

from __future__ import annotations

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.outputs import bounds, ends_in, may_come_from
from sonde.diagnosis.rule import Rule, above, below
from sonde.diagnosis.seen_loss import SeenLoss, seen_losses
from sonde.records import Finding

_LOSSES = ("cross_entropy", "binary_cross_entropy_with_logits", "multi_margin_loss")


def check(case: Case) -> Finding | None:
    """Find logits that are never negative and often exactly zero."""
    for loss in seen_losses(case, *_LOSSES):
        recent = loss.values.last(5)
        low = bounds(recent)[0]
        zeros = float(recent.stat("zero_share").mean())
        enough = len(recent) >= thresholds.LOSS_LOOKS.value and bool((low == 0).all())
        if enough and zeros >= thresholds.RELU_ZERO_SHARE.value and may_come_from(loss, "relu"):
            return _finding(case, loss, zeros)
    return None


def _finding(case: Case, loss: SeenLoss, zeros: float) -> Finding:
    culprit = ends_in(case, "ReLU", "ReLU6")
    return RULE.finding(
        case,
        "warning",
        0.97 if culprit else 0.92,
        sites=(culprit, vitals.LOSS) if culprit else (vitals.LOSS,),
        step=int(loss.values.steps[0]),
        evidence=(
            above(
                "share of logits that are exactly 0", zeros, thresholds.RELU_ZERO_SHARE, f"{loss.values.key} zero_share"
            ),
            below("smallest logit", 0.0, 0.0, f"{loss.values.key} min"),
        ),
        cause=f"The logits pass through a rectifier: {zeros:.0%} of them are exactly 0, so no class can be said to be "
        "unlikely, and those zeros pass no gradient.",
        fix=f"Remove the ReLU{f' ({culprit})' if culprit else ''} behind the last layer.",
        refute="If any logit is negative, it is wrong.",
    )


RULE = Rule(kind="relu_before_logits", check=check, since=2)
