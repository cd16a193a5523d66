"""A loss that wants probabilities or their logarithms and is given something else."""

from __future__ import annotations

import numpy as np

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.outputs import bounds
from sonde.diagnosis.rule import Rule, above
from sonde.diagnosis.seen_loss import SeenLoss, seen_losses
from sonde.records import Finding

_TORCH_SAYS = "all elements of input should be between 0 and 1"
# Rounding may lift the logarithm of a probability of 1 just above 0.
_ZERO = 1e-3


def check(case: Case) -> Finding | None:
    """Find log-probabilities above 0, and binary cross entropy that torch refused."""
    refused = any(_TORCH_SAYS in event.message for event in case.events if event.event_type == "exception")
    if refused:
        return _finding(case, "binary_cross_entropy", "probabilities", None)
    for loss in seen_losses(case, "nll_loss", "kl_div"):
        highest = bounds(loss.values)[1]
        above_zero = highest > _ZERO
        if above_zero.sum() >= thresholds.LOSS_LOOKS.value:
            return _finding(case, loss.kind, "logarithms of probabilities", loss)
    return next((_clamped(case, loss) for loss in seen_losses(case, "binary_cross_entropy") if _is_clamped(loss)), None)


def _is_clamped(loss: SeenLoss) -> bool:
    """Say whether a fresh model gave many probabilities of exactly 0: numbers that were cut off, not squashed."""
    zeros, (low, _) = loss.vital(vitals.ZERO_SHARE), bounds(loss.values)
    if zeros is None or len(zeros) < thresholds.LOSS_LOOKS.value or not bool((low >= 0).all()):
        return False
    return bool((zeros.numbers()[: int(thresholds.LOSS_LOOKS.value)] >= thresholds.CLAMPED_SHARE.value).all())


def _clamped(case: Case, loss: SeenLoss) -> Finding:
    zeros = loss.vital(vitals.ZERO_SHARE)
    share = float("nan") if zeros is None else float(zeros.numbers()[0])
    return RULE.finding(
        case,
        "critical",
        0.9,
        sites=(vitals.LOSS,),
        step=int(loss.values.steps[0]),
        evidence=(above("share of exact zeros among the first probabilities", share, thresholds.CLAMPED_SHARE),),
        cause=f"{share:.0%} of the probabilities that a fresh model gives binary_cross_entropy are exactly 0: its "
        "outputs are cut off at 0, not passed through a sigmoid. What is cut off gets no gradient.",
        fix="Use binary_cross_entropy_with_logits on the raw outputs, or sigmoid instead of clamp or relu.",
        refute="Print the outputs before the loss: if a sigmoid made them, it is wrong.",
    )


def _finding(case: Case, kind: str, wanted: str, loss: SeenLoss | None) -> Finding:
    evidence = []
    if loss is not None:
        highest = bounds(loss.values)[1]
        evidence.append(above("largest number the loss was given", float(np.max(highest)), _ZERO, loss.values.key))
    cures = {
        "nll_loss": "Use cross_entropy on the logits, or apply log_softmax(..., dim=1) first (not softmax).",
        "kl_div": "Apply log_softmax(..., dim=-1) to its input.",
        "binary_cross_entropy": "Use binary_cross_entropy_with_logits, or apply sigmoid first.",
    }
    return RULE.finding(
        case,
        "critical",
        0.98,
        sites=(vitals.LOSS,),
        step=case.step if loss is None else int(loss.values.steps[0]),
        evidence=tuple(evidence),
        cause=f"{kind} wants {wanted}, but is given numbers that cannot be such: it can be made as low as one likes "
        "without getting anything right.",
        fix=cures[kind],
        refute="Print the smallest and largest of what the loss is given: log-probabilities are never above 0, "
        "probabilities lie between 0 and 1.",
    )


RULE = Rule(kind="logits_into_prob_loss", check=check, since=0)
