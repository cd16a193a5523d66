"""A sigmoid before a loss that takes one itself."""

from __future__ import annotations

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.outputs import bounds, ends_in, may_come_from
from sonde.diagnosis.rule import Rule, above, below, fact
from sonde.diagnosis.seen_loss import SeenLoss, seen_losses
from sonde.records import Finding

_FLOOR = 0.3133  # ln(1 + 1/e): the loss of a sure and right answer of 1


def check(case: Case) -> Finding | None:
    """Find binary cross entropy with logits whose input stays between 0 and 1."""
    for loss in seen_losses(case, "binary_cross_entropy_with_logits", "multilabel_soft_margin_loss"):
        low, high = bounds(loss.values)
        # Exact zeros come from a rectifier, whose outputs may happen to stay below 1.
        squashed = low.min() >= 0 and high.max() <= 1 and high.max() > 0 and not (low == 0).all()
        looks = thresholds.LOSS_LOOKS.value if ends_in(case, "Sigmoid") else 2 * thresholds.LOSS_LOOKS.value
        if squashed and len(loss.values) >= looks and may_come_from(loss, "sigmoid", "softmax"):
            return _finding(case, loss, float(low.min()), float(high.max()))
    return None


def _finding(case: Case, loss: SeenLoss, low: float, high: float) -> Finding:
    culprit = ends_in(case, "Sigmoid")
    return RULE.finding(
        case,
        "warning",
        0.98 if culprit else 0.9,
        sites=(culprit, vitals.LOSS) if culprit else (vitals.LOSS,),
        step=int(loss.values.steps[0]),
        evidence=(
            above("smallest number the loss was given", low, 0.0, f"{loss.values.key} min"),
            below("largest number the loss was given", high, 1.0, f"{loss.values.key} max"),
            fact("loss that a positive sample cannot go below", _FLOOR),
        ),
        cause=f"{loss.kind} is given probabilities instead of logits and takes a second sigmoid: no answer can be "
        "surer than 0.73.",
        fix=f"Remove the sigmoid{f' ({culprit})' if culprit else ''} from the model, or use binary_cross_entropy.",
        refute="If what the loss is given is ever negative or above 1, it is wrong.",
    )


RULE = Rule(kind="double_sigmoid", check=check, since=2)
