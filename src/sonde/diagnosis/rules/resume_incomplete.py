"""A run that was taken up again without all of its state."""

from __future__ import annotations

import numpy as np

from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.fresh_step import fresh_steps
from sonde.diagnosis.resumed import boundaries
from sonde.diagnosis.rule import Rule, fact
from sonde.records import Evidence, Finding


def check(case: Case) -> Finding | None:
    """Find an optimizer, a schedule or a scaler that began anew where the run was taken up again."""
    for start in boundaries(case):
        lost = [*_optimizer(case, start), *_counter(case, start), *_rate(case, start)]
        if lost:
            return _finding(case, start, lost)
    return None


def _finding(case: Case, start: int, lost: list[tuple[str, Evidence]]) -> Finding:
    names = list(dict.fromkeys(name for name, _ in lost))
    return RULE.finding(
        case,
        "warning",
        0.95,
        sites=tuple(names),
        step=start,
        evidence=tuple(evidence for _, evidence in lost),
        cause=f"The run was taken up again at step {start} without the state of its {' and '.join(names)}.",
        fix="Save and load optimizer.state_dict(), scheduler.state_dict() and scaler.state_dict() together with the "
        "model's.",
        refute="Print optimizer.state_dict()['state'] and scheduler.last_epoch right after loading: if they hold what "
        "they held before, it is wrong.",
    )


def _optimizer(case: Case, start: int) -> list[tuple[str, Evidence]]:
    try:
        steps, fresh = fresh_steps(case)
    except NotMeasured:
        return []
    at = np.flatnonzero(steps == start)
    later = fresh[steps > start][:5]
    if not len(at) or not fresh[at[0]] or (len(later) and later.mean() > 0.5):
        return []
    return [("optimizer", fact("weights moved by just the learning rate, as by a fresh optimizer, in step", start))]


def _counter(case: Case, start: int) -> list[tuple[str, Evidence]]:
    before, after = _around(case, "scheduler.last_epoch", start)
    if before is None or after is None or after >= before:
        return []
    return [
        ("scheduler", fact(f"scheduler.last_epoch after it was {before:g}", after, "scheduler.last_epoch:scalar mean"))
    ]


def _rate(case: Case, start: int) -> list[tuple[str, Evidence]]:
    before, after = _around(case, "optimizer.group0.lr", start)
    counted = case.scalar("scheduler.last_epoch") is not None
    if before is None or after is None or not counted or after <= 2 * before:
        return []
    return [("scheduler", fact(f"learning rate after it was {before:g}", after, "optimizer.group0.lr:scalar mean"))]


def _around(case: Case, name: str, start: int) -> tuple[float | None, float | None]:
    curve = case.scalar(name)
    if curve is None:
        return None, None
    steps, values = curve
    earlier, later = values[steps < start], values[steps >= start]
    return (float(earlier[-1]) if len(earlier) else None), (float(later[0]) if len(later) else None)


RULE = Rule(kind="resume_incomplete", check=check, since=1)
