"""Batches that are mostly padding."""

from __future__ import annotations

import numpy as np

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Rule, below, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find batches most of whose targets do not count."""
    valid = case.need_vital(vitals.LOSS, vitals.VALID_TARGETS)
    loss = case.loss_facts("cross_entropy", "nll_loss")
    if loss is None or len(valid) < 5 or len(loss.target_shape) < 1:
        return None
    target = case.track(f"{vitals.LOSS}:input.target")
    if target is None:
        return None
    counts = dict(zip(target.steps.tolist(), target.stat("count").tolist(), strict=True))
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


RULE = Rule(kind="padding_dominates", check=check, since=5)
