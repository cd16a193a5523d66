"""Gradients that are too small for float16."""

from __future__ import annotations

import numpy as np

from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.ownership import few
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find weights trained in float16 without a scaler, most of whose gradients are exactly zero."""
    if case.facts.scaler or case.scalar("scaler.scale") is not None:
        return None
    panel = case.panel("gradient")
    chosen = [
        at
        for at, site in enumerate(panel.sites)
        if len(site.shape) >= 2 and "Embedding" not in site.kind and "float16" in (site.dtype, case.facts.autocast)
    ]
    if not chosen:
        return None
    panel = panel.pick(chosen)
    zeros = panel.stat("zero_share")
    alive = panel.stat("abs_max") > 0
    shares = np.array(
        [np.median(column[ok]) if ok.sum() >= 5 else 0.0 for column, ok in zip(zeros.T, alive.T, strict=True)]
    )
    lost = [
        (panel.names[at], float(share)) for at, share in enumerate(shares) if share >= thresholds.UNDERFLOW_SHARE.value
    ]
    if not lost:
        return None
    names = [name for name, _ in lost]
    return RULE.finding(
        case,
        "warning",
        0.85,
        sites=tuple(names),
        step=int(panel.steps[0]),
        evidence=(
            above(
                "share of gradients that are exactly 0",
                lost[0][1],
                thresholds.UNDERFLOW_SHARE,
                f"{names[0]}:gradient zero_share",
            ),
            fact("smallest number float16 holds", 2.0**-24),
            fact("weights", len(names)),
        ),
        cause=f"Gradients of {few(names)} are computed in float16 without a gradient scaler: {lost[0][1]:.0%} of them "
        "are too small for it and become 0.",
        fix="Use torch.amp.GradScaler, or bfloat16.",
        refute="Compute the gradients of one batch in float32: if as many are zero, it is not the precision.",
    )


RULE = Rule(kind="grad_underflow", check=check, since=5)
