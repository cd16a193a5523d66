"""A gradient scaler that finds no scale that fits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.rule import Rule, above, below, fact
from sonde.diagnosis.track import Values
from sonde.records import Evidence, Finding


def check(case: Case) -> Finding | None:
    """Find a scale below 1, or steps that are held back long after the scale should have settled."""
    curve = case.scalar("scaler.scale")
    if curve is None:
        if case.facts.scaler:
            raise NotMeasured("scaler.scale")
        return None
    steps, scales = curve
    window = int(thresholds.SKIP_WINDOW.value)
    recent = case.recent_steps[-window:]
    skipped = float(np.isin(recent, case.history.skipped_steps()).mean()) if len(recent) == window else 0.0
    settled = case.num_steps >= 2 * window
    if scales[-1] < thresholds.SCALE_FLOOR.value:
        return _finding(
            case, steps, scales, below("scale now", scales[-1], thresholds.SCALE_FLOOR, "scaler.scale:scalar mean")
        )
    if settled and skipped > thresholds.SKIPPED_SHARE.value:
        return _finding(case, steps, scales, above("share of late steps held back", skipped, thresholds.SKIPPED_SHARE))
    return None


def _finding(case: Case, steps: NDArray[np.int64], scales: Values, why: Evidence) -> Finding:
    falls = np.flatnonzero(np.diff(scales) < 0)
    return RULE.finding(
        case,
        "critical",
        0.93,
        sites=("scaler",),
        step=int(steps[falls[0] + 1]) if len(falls) else None,
        evidence=(why, fact("scale at the start", float(scales[0])), fact("times it was lowered", len(falls))),
        cause=f"Gradients are infinite or NaN whatever the scale: it has fallen from {scales[0]:g} to {scales[-1]:g} "
        "and steps are held back.",
        fix="Find the layer whose gradients are not finite first (sonde show RUN --step N); use bfloat16, a smaller "
        "learning rate, or clip after scaler.unscale_(optimizer).",
        refute="Train some steps in float32: finite gradients point at float16, others at the model.",
    )


RULE = Rule(kind="loss_scale_collapse", check=check, since=5)
