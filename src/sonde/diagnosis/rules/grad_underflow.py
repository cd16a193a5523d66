"""Gradients that are too small for float16."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.ownership import few
from sonde.diagnosis.panel import Panel
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
    shares[_are_gone(case, panel, alive)] = 1.0
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


def _are_gone(case: Case, panel: Panel, alive: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Say which weights never have a gradient, where those of all others are so small that float16 hardly holds them.

    A layer may also be dead; but that leaves the gradients of the layers behind it as large as they were.
    """
    losses = case.loss()
    if losses is None or not (losses[1][-5:] > 0).all() or len(panel.steps) < 5:
        return np.zeros(len(panel.sites), np.bool_)
    largest = panel.stat("abs_max")[-5:]
    gone = np.asarray(panel.read[-5:].all(axis=0) & ~alive[-5:].any(axis=0), np.bool_)
    tiny = not (largest > thresholds.FLOAT16_SMALLEST_NORMAL.value).any()
    return gone if tiny else np.zeros(len(panel.sites), np.bool_)


RULE = Rule(kind="grad_underflow", check=check, since=5)
