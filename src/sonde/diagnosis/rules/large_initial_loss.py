"""A loss that starts far above that of guessing."""

from __future__ import annotations

import math

import numpy as np

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.ownership import output_module
from sonde.diagnosis.rule import Rule, above, fact
from sonde.diagnosis.seen_loss import SeenLoss, seen_losses
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find a classifier that is sure of wrong answers before it has learnt any."""
    for loss in seen_losses(case, "cross_entropy", "nll_loss"):
        expected, output = _expected(loss), loss.output
        if expected is None or output is None or output.steps[0] > 1 or case.history.first_step not in (0, 1):
            continue
        ratio = float(output.numbers()[0]) / expected
        if np.isfinite(ratio) and ratio >= thresholds.INITIAL_LOSS_RATIO.value:
            return _finding(case, loss, ratio, expected)
    return None


def _expected(loss: SeenLoss) -> float | None:
    facts = loss.facts
    if facts is None or facts.settings.get("reduction") != "mean" or facts.settings.get("weighted"):
        return None
    return math.log(facts.classes) if facts.classes and facts.classes > 1 else None


def _finding(case: Case, loss: SeenLoss, ratio: float, expected: float) -> Finding:
    huge = ratio >= thresholds.HUGE_INITIAL_LOSS_RATIO.value
    head = output_module(case)
    output = loss.output
    return RULE.finding(
        case,
        "warning" if huge else "info",
        0.85,
        sites=(head, vitals.LOSS) if head else (vitals.LOSS,),
        step=1,
        evidence=(
            above("first loss over that of guessing", ratio, thresholds.INITIAL_LOSS_RATIO),
            fact("first loss", ratio * expected, "" if output is None else f"{output.key} mean"),
            fact("loss of guessing, ln(classes)", expected),
        ),
        cause=f"The loss starts at {ratio * expected:.2f}, {ratio:.1f} times the {expected:.2f} of a guess: the first "
        "outputs are large and wrong, and the first steps are spent on unlearning them.",
        fix=f"Make the initial weights of {head or 'the last layer'} smaller (for example nn.init.normal_(w, std=0.01)"
        "), or normalise what it is given.",
        refute="Multiply the logits by 0.1 before the first step: if the loss does not come near ln(classes), the "
        "labels are at fault.",
    )


RULE = Rule(kind="large_initial_loss", check=check, since=1)
