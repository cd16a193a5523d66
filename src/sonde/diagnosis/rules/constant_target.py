"""Targets that are all the same number."""

from __future__ import annotations

import numpy as np

from sonde import schema, vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Rule, above, fact
from sonde.diagnosis.seen_loss import seen_losses
from sonde.diagnosis.track import Track
from sonde.records import Finding

_REGRESSIONS = ("huber_loss", "l1_loss", "mse_loss", "smooth_l1_loss")
_BINARY = ("binary_cross_entropy", "binary_cross_entropy_with_logits")
# What a layer or its activation returns. Anything else, such as a residual that is to become 0, was computed from it.
_LAYERS = ("", "addmm", "convolution", "mm", "relu", "sigmoid", "softplus", "tanh")


def check(case: Case) -> Finding | None:
    """Find a loss that holds the model's own output against one and the same number, in every batch of the run."""
    losses = [loss for loss in seen_losses(case, *_REGRESSIONS, *_BINARY) if loss.target is not None]
    known = case.facts.losses
    # In a game of two each side has targets of its own. Where there are several losses, one may be a pull to zero.
    if len(losses) != 1 or len(known) != 1 or len(case.facts.optimizers) > 1 or known[0].made_by not in _LAYERS:
        return None
    target = losses[0].target
    # Samples that come class by class have equal targets for a while.
    if target is None or (losses[0].kind in _BINARY and not case.final) or not _is_constant(target):
        return None
    number = float(target.rows[-1, schema.MAX])
    return RULE.finding(
        case,
        "warning",
        0.9,
        sites=(vitals.LOSS, "loader"),
        step=int(target.steps[0]),
        evidence=(
            above("steps in which all targets were the same", len(target), thresholds.SAME_TARGET_STEPS, target.key),
            fact("the number they were", number),
        ),
        cause=f"Every target is {number:g}: the model can only learn to answer with that.",
        fix="Look at how targets are read and cast: .long() makes 0 of all fractions, and // of what is smaller.",
        refute="Print the targets of a few batches: two different numbers refute it.",
    )


def _is_constant(target: Track) -> bool:
    low, high = target.rows[:, schema.MIN], target.rows[:, schema.MAX]
    enough = len(target) >= thresholds.SAME_TARGET_STEPS.value and float(target.rows[:, schema.COUNT].min()) > 1
    bad = target.rows[:, [schema.NAN, schema.POS_INF, schema.NEG_INF]] > 0
    return enough and not bad.any() and bool(np.all(low == high[0]) and np.all(high == high[0]))


RULE = Rule(kind="constant_target", check=check, since=int(thresholds.SAME_TARGET_STEPS.value))
