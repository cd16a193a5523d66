"""A loss that is made larger instead of smaller."""

from __future__ import annotations

import numpy as np

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.root import root_ratios
from sonde.diagnosis.rule import Rule, above, below, fact
from sonde.diagnosis.track import Values
from sonde.records import Evidence, Finding

# Losses that are 0 at best: whoever lowers their negative seeks the worst.
_NEVER_NEGATIVE = ("cross_entropy", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "nll_loss",
                   "binary_cross_entropy", "binary_cross_entropy_with_logits")  # fmt: skip


def check(case: Case) -> Finding | None:
    """Find backward passes of a negative loss, or a loss that falls without end.

    In a game of several optimizers one of them raises what another lowers.
    """
    if len(case.facts.optimizers) > 1:
        return None
    ratios = root_ratios(case)
    if ratios is not None and case.loss_facts(*_NEVER_NEGATIVE) is not None:
        recent = ratios[-3:]
        if len(recent) >= thresholds.LOSS_LOOKS.value and bool((recent < 0).all()):
            turned = below(
                "what backward() was called on, over the loss", float(recent.mean()), 0.0, "(loop):vital.root mean"
            )
            return _finding(case, 0.97, (turned,))
        return None
    curve = case.loss()
    if curve is None:
        raise NotMeasured("a loss")
    return _falls_without_end(case, curve[1])


def _falls_without_end(case: Case, losses: Values) -> Finding | None:
    """Tell a loss that runs away below zero, ever faster, from one that may be negative, as a likelihood is."""
    losses = losses[np.isfinite(losses)]
    if len(losses) < 20:
        return None
    quarter = len(losses) // 4
    ends = np.array([np.median(part) for part in (losses[:3], losses[quarter : 2 * quarter], losses[-quarter:])])
    scale = max(abs(float(ends[0])), 1.0)
    if ends[2] >= -thresholds.FALLING_BELOW.value * scale:
        return None
    falls = ends[:-1] - ends[1:]
    if falls[1] < 2 * falls[0] or falls[0] <= 0:
        return None
    evidence = (
        below("loss now", float(ends[2]), -thresholds.FALLING_BELOW.value * scale),
        above("fall of late over the fall at first", float(falls[1] / falls[0]), 2.0),
        fact("loss at the start", float(ends[0])),
    )
    return _finding(case, 0.8, evidence)


def _finding(case: Case, confidence: float, evidence: tuple[Evidence, ...]) -> Finding:
    return RULE.finding(
        case,
        "critical",
        confidence,
        sites=(vitals.LOSS,),
        step=1,
        evidence=evidence,
        cause="Training makes the loss worse on purpose: what is differentiated has the wrong sign.",
        fix="Minimise the loss itself; for a likelihood or a reward minimise its negative. Look for a minus that is "
        "missing or one too many before .backward().",
        refute="Take one small step on a batch: if the loss on that batch gets better, the sign is right.",
    )


RULE = Rule(kind="loss_sign_flipped", check=check, since=2)
