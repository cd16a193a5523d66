"""A loss that is made larger instead of smaller."""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.learning import judge
from sonde.diagnosis.root import root_ratios
from sonde.diagnosis.rule import Rule, above, below, fact
from sonde.diagnosis.track import Values
from sonde.facts import LIKELIHOOD
from sonde.records import Evidence, Finding

# Losses that are 0 at best: whoever lowers their negative seeks the worst.
_NEVER_NEGATIVE = ("cross_entropy", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "nll_loss",
                   "binary_cross_entropy", "binary_cross_entropy_with_logits")  # fmt: skip


# Numbers that people log because they should rise.
_SCORE: Final = re.compile(
    r"(^|[^a-z])(acc|accuracy|auc|bleu|dice|f1|hits|iou|map|psnr|r2|recall|return|returns|reward|rewards|score|ssim|top1)"
    r"([^a-z]|$)",
    re.IGNORECASE,
)
_NO_SCORE: Final = re.compile("loss|error", re.IGNORECASE)


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
    if case.loss_facts(LIKELIHOOD) is not None:
        return _finding(case, 0.93, (fact("log-probabilities that are made small, not large", 1),))
    fallen = _fallen_score(case)
    if fallen is not None:
        return _finding(case, 0.75, fallen)
    curve = case.loss()
    if curve is None:
        raise NotMeasured("a loss")
    return _falls_without_end(case, curve[1])


def _fallen_score(case: Case) -> tuple[Evidence, ...] | None:
    """Return what shows that a logged score has fallen far below its start while the loss has not risen.

    Such a number should rise; then what is made small is not what is wanted small.
    """
    if case.learning.state in ("worse", "broken"):
        return None
    for name in case.scalars():
        curve = case.scalar(name) if _SCORE.search(name) and not _NO_SCORE.search(name) else None
        if curve is None:
            continue
        values = curve[1]
        start, now = float(values[:3].max()), float(np.median(values[-max(3, len(values) // 5) :]))
        lost = (start - now) / start if start > 0 else 0.0
        # It falls as a good loss does.
        if lost >= thresholds.SCORE_LOST.value and judge(values).state == "improving":
            return (
                above(f"share of {name} lost since the start", lost, thresholds.SCORE_LOST, f"{name}:scalar mean"),
                fact(f"{name} of the first steps", start),
                fact(f"{name} now", now),
            )
    return None


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
