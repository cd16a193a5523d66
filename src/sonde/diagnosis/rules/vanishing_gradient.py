"""Gradients that fade on their way to the first layers."""

from __future__ import annotations

import numpy as np

from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.outlook import gravity, is_failing
from sonde.diagnosis.rule import Rule, below, fact
from sonde.diagnosis.track import Values
from sonde.diagnosis.weights import last_weights
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find gradients that, held against their weights, fall by orders of magnitude from the last layer to the first."""
    weights = last_weights(case)
    ratios = weights.gradient_ratio[-int(thresholds.GRADIENT_STEPS.value) :]
    if ratios.shape[1] < 3 or len(ratios) < thresholds.GRADIENT_STEPS.value or not is_failing(case):
        return None
    if not np.isfinite(ratios).all() or (ratios == 0).any():  # no gradient at all is another disease
        return None
    profile = np.median(np.log10(ratios), axis=0)
    fall = 10 ** float(profile[0] - profile[-1])
    if fall > thresholds.GRADIENT_FALL.value or _rank_correlation(profile) < 0.7:
        return None
    faint = [name for name, level in zip(weights.names, profile, strict=True) if level < profile[-1] - 2]
    return RULE.finding(
        case,
        gravity(case),
        0.8,
        sites=tuple(faint[:6]) or (weights.names[0],),
        step=int(weights.steps[-len(ratios)]),
        evidence=(
            below("gradient over weight in the first layer, over that in the last", fall, thresholds.GRADIENT_FALL),
            fact("gradient over weight in the first layer", 10 ** profile[0], f"{weights.names[0]}:gradient rms"),
            fact("the same in the last layer", 10 ** profile[-1], f"{weights.names[-1]}:gradient rms"),
        ),
        cause=f"Gradients vanish on the way down: {weights.names[0]} gets {fall:.1e} of what the last layer gets.",
        fix="Use ReLU or GELU with kaiming_normal_ instead of sigmoid or tanh, add norms or residual connections.",
        refute="Train the first layers alone at a rate a thousand times higher: a loss that stays refutes it.",
    )


def _rank_correlation(profile: Values) -> float:
    """Return how steadily a profile rises with depth: 1 if always."""
    ranks = np.argsort(np.argsort(profile))
    return float(np.corrcoef(ranks, np.arange(len(profile)))[0, 1])


RULE = Rule(kind="vanishing_gradient", check=check, since=int(thresholds.GRADIENT_STEPS.value))
