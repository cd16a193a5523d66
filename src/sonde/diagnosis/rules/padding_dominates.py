"""Batches that are mostly padding."""

from __future__ import annotations

import numpy as np

from sonde import schema, vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Rule, above, below, fact
from sonde.diagnosis.track import Track
from sonde.records import Finding

_LOOKS = 3


def check(case: Case) -> Finding | None:
    """Find batches that are mostly padding: it counts in the loss, or most targets do not count."""
    counted = case.vital(vitals.LOSS, vitals.COUNTED_PADDING)
    if counted is not None and len(counted) >= _LOOKS:
        share = float(np.median(counted.numbers()))
        if share > thresholds.COUNTED_SHARE.value:
            return _counts(case, counted, share)
    valid = case.need_vital(vitals.LOSS, vitals.VALID_TARGETS)
    loss = case.loss_facts("cross_entropy", "nll_loss")
    if loss is None or len(valid) < 5 or len(loss.target_shape) < 1:
        return None
    target = case.track(f"{vitals.LOSS}:input.target")
    if target is None:
        return None
    # A step may have several batches, of which only some were looked at.
    each = target.stat("count") / np.maximum(target.rows[:, schema.SEEN], 1)
    counts = dict(zip(target.steps.tolist(), each.tolist(), strict=True))
    shares = [n / counts[step] for step, n in zip(valid.steps.tolist(), valid.numbers(), strict=True) if step in counts]
    # Of large targets only a part is counted; then the share cannot be told.
    share = float(np.median(shares)) if shares else float("nan")
    if not 0 < share < thresholds.VALID_SHARE.value:
        return None
    return RULE.finding(
        case,
        "info",
        0.8,
        sites=("loader", "loss_fn"),
        step=int(valid.steps[0]),
        evidence=(
            below("share of targets that count", share, thresholds.VALID_SHARE, f"{valid.key} mean"),
            fact("batches looked at", len(valid)),
        ),
        cause=f"Only {share:.0%} of the targets count: most of every batch is padding, and most of the work is wasted.",
        fix="Sort samples by length into buckets, or pack several sequences into one row.",
        refute="Count the targets that are not ignore_index in a few batches: more than half refutes it.",
    )


def _counts(case: Case, counted: Track, share: float) -> Finding:
    return RULE.finding(
        case,
        "warning",
        0.9,
        sites=("loss_fn", "loader"),
        step=int(counted.steps[0]),
        evidence=(
            above("share of the targets that are padding and count", share, thresholds.COUNTED_SHARE, counted.key),
            fact("batches looked at", len(counted)),
        ),
        cause=f"{share:.0%} of what the loss averages over is padding: rows end in one and the same token, which "
        "always has the same label. The model is praised for padding, and the rest is diluted.",
        fix="Give the label of padding to the loss as ignore_index, or set those targets to -100.",
        refute="Count the targets where the input is padding: less than half refutes it.",
    )


RULE = Rule(kind="padding_dominates", check=check, since=3)
