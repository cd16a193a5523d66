"""An eps that drowns the gradient."""

from __future__ import annotations

import numpy as np

from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.outlook import gravity
from sonde.diagnosis.rule import Rule, above, fact
from sonde.diagnosis.weights import last_weights
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find an adaptive optimizer whose eps is many times the size of the gradients it divides by."""
    case.need_facts()
    settings = [
        group.settings for optimizer in case.facts.optimizers if "Adam" in optimizer.kind for group in optimizer.groups
    ]
    eps = max((value for each in settings if isinstance(value := each.get("eps"), float)), default=0.0)
    if eps <= 1e-7:
        return None
    weights = last_weights(case)
    sizes = weights.gradients[-20:]
    known = sizes[np.isfinite(sizes) & (sizes > 0)]
    ratio = eps / float(np.median(known)) if len(known) else 0.0
    if ratio < thresholds.EPS_OVER_GRADIENT.value:
        return None
    return RULE.finding(
        case,
        gravity(case),
        0.8,
        sites=("optimizer",),
        step=int(weights.steps[0]),
        evidence=(
            above("eps over the size of a usual gradient", ratio, thresholds.EPS_OVER_GRADIENT),
            fact("eps", eps),
        ),
        cause="Adam's eps is larger than the gradients: it no longer adapts, and its steps are far shorter than lr.",
        fix="Use eps=1e-8, or raise the learning rate if the large eps is meant.",
        refute="Train with eps=1e-8: if the loss falls no faster, eps was not the reason.",
    )


RULE = Rule(kind="adam_eps_too_large", check=check, since=20)
