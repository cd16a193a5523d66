"""Training that waits for its data."""

from __future__ import annotations

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find a loop that spends a good part of its time waiting for the loader."""
    waits = case.need_vital(vitals.LOOP, vitals.DATA_WAIT).last(64)
    times = case.need_vital(vitals.LOOP, vitals.STEP_TIME).last(64)
    if len(waits) < thresholds.WAIT_STEPS.value or len(times) < thresholds.WAIT_STEPS.value:
        return None
    each, step = float(waits.numbers().mean()), float(times.numbers().mean())
    share = each / step if step > 0 else 0.0
    if share < thresholds.WAIT_SHARE.value or each < thresholds.WAIT_SECONDS.value:
        return None
    workers = None if case.facts.loader is None else case.facts.loader.settings.get("num_workers")
    return RULE.finding(
        case,
        "warning" if share >= 0.5 else "info",
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


RULE = Rule(kind="starved_loader", check=check, since=int(thresholds.WAIT_STEPS.value))
