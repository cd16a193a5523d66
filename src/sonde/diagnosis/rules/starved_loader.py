"""Training that waits for its data."""

from __future__ import annotations

from typing import Final

import numpy as np

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Rule, above, fact
from sonde.diagnosis.track import Values
from sonde.records import Finding

QUARTERS: Final = 4


def check(case: Case) -> Finding | None:
    """Find a loop that spends a good part of its time waiting for the loader, in every quarter of the last steps."""
    waits = case.need_vital(vitals.LOOP, vitals.DATA_WAIT).last(64)
    times = case.need_vital(vitals.LOOP, vitals.STEP_TIME).last(64)
    _, at, of = np.intersect1d(waits.steps, times.steps, return_indices=True)
    if len(at) < thresholds.WAIT_STEPS.value:
        return None
    waited, took = waits.numbers()[at], times.numbers()[of]
    each = float(np.median([part.mean() for part in np.array_split(waited, QUARTERS)]))
    share = min(map(_share, np.array_split(waited, QUARTERS), np.array_split(took, QUARTERS)))
    if share < thresholds.WAIT_SHARE.value or each < thresholds.WAIT_SECONDS.value:
        return None
    workers = None if case.facts.loader is None else case.facts.loader.settings.get("num_workers")
    return RULE.finding(
        case,
        "warning" if share >= thresholds.WAIT_MOSTLY.value else "info",
        0.85,
        sites=("loader",),
        step=int(waits.steps[0]),
        evidence=(
            above("share of the step spent waiting for data", share, thresholds.WAIT_SHARE, f"{waits.key} mean"),
            above("seconds of waiting a step", each, thresholds.WAIT_SECONDS),
            fact("workers of the loader", workers if isinstance(workers, int) else float("nan")),
        ),
        cause=f"The loop waits for its data for {share:.0%} of the time.",
        fix="Use more workers (num_workers=4, persistent_workers=True), cache decoded samples, or prepare them once.",
        refute="Train on one batch kept in memory: if steps are as slow, it is not the loader.",
    )


def _share(waited: Values, took: Values) -> float:
    """Return the share of the time that was waited, without the longest waits: a busy machine makes a few."""
    usual = np.argsort(waited)[: len(waited) - max(1, len(waited) // 8)]
    total = float(took[usual].sum())
    return float(waited[usual].sum()) / total if total > 0 else 0.0


RULE = Rule(kind="starved_loader", check=check, since=int(thresholds.WAIT_STEPS.value))
