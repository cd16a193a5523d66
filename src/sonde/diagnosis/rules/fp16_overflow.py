"""Numbers that are too large for float16."""

from __future__ import annotations

import numpy as np

from sonde import measures, schema
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.nonfinite import READINGS, TOLD_FROM
from sonde.diagnosis.ownership import few
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find outputs in float16 that are infinite, or nearly at the end of what it can hold."""
    panel = case.panel("output")
    chosen = [at for at, site in enumerate(panel.sites) if site.dtype == "float16"]
    if not chosen:
        return None
    panel = panel.pick(chosen)
    largest = np.nan_to_num(measures.abs_max(panel.rows))
    infinite = measures.inf(panel.rows) > 0
    full = panel.read & (infinite | (largest >= thresholds.FLOAT16_NEAR_LIMIT.value))
    if not full.any():
        return None
    at = int(np.argmax(full.any(axis=0)))
    names = [panel.names[index] for index in np.flatnonzero(full.any(axis=0))]
    over = bool(infinite.any())
    return RULE.finding(
        case,
        "critical" if over else "warning",
        0.95 if over else 0.85,
        sites=tuple(dict.fromkeys(names)),
        step=int(panel.steps[full.any(axis=1)][0]),
        evidence=(
            above("largest finite output", float(largest[:, at].max()), 0.0, f"{names[0]}:output abs_max"),
            fact("the largest number float16 holds", 65504.0),
            fact("infinite numbers", float(panel.rows[:, at, [schema.POS_INF, schema.NEG_INF]].sum())),
        ),
        cause=f"The output of {few(names)} {'exceeds' if over else 'comes near'} 65504, the end of float16"
        + (", and becomes infinite." if over else "."),
        fix="Use bfloat16, run this layer outside autocast, or make its values smaller: average instead of summing, "
        "normalise its input.",
        refute="Run the same batch in float32: if its outputs stay well below 65504, something else overflows.",
        data={TOLD_FROM: READINGS},
    )


RULE = Rule(kind="fp16_overflow", check=check, since=1)
