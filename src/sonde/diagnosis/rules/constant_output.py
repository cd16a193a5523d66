"""A model that says the same whatever it is shown."""

from __future__ import annotations

import numpy as np

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.outlook import gravity
from sonde.diagnosis.rule import Rule, below, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find outputs that do not differ between samples, at each look beyond the first steps."""
    spread = case.need_vital(vitals.LOSS, vitals.SAMPLE_SPREAD)
    values = spread.numbers()
    if len(values) < 6 or spread.steps[-1] < 20:
        return None
    target = case.vital(vitals.LOSS, vitals.TARGET_SPREAD)
    wanted = float(np.median(target.numbers())) if target is not None else _scale(case)
    if wanted <= 0:
        return None
    ratio = float(values[-4:].max()) / wanted
    if not ratio <= thresholds.OUTPUT_SPREAD.value:
        return None
    flat = values <= thresholds.OUTPUT_SPREAD.value * wanted
    return RULE.finding(
        case,
        gravity(case),
        0.85,
        sites=("(model)",),
        step=int(spread.steps[flat][0]),
        evidence=(
            below(
                "variance of the output across samples over what it should be",
                ratio,
                thresholds.OUTPUT_SPREAD,
                f"{spread.key} mean",
            ),
            fact("looks at which it was so", int(flat.sum())),
        ),
        cause="The model's output does not depend on its input: every sample gets the same answer.",
        fix="Look for the layer where samples become equal: dead rectifiers, weights at zero, a mean over the batch.",
        refute="Print the outputs for two different samples: a difference beyond rounding refutes it.",
    )


def _scale(case: Case) -> float:
    """Return how far logits should differ at least: as much as their own size, or one."""
    inputs = case.track(f"{vitals.LOSS}:input.input")
    sizes = np.ones(1) if inputs is None else inputs.stat("rms")[-4:]
    sizes = sizes[np.isfinite(sizes)]
    size = float(np.median(sizes)) if len(sizes) else 0.0
    return min(1.0, size**2) if size > 0 else 0.0


RULE = Rule(kind="constant_output", check=check, since=20)
