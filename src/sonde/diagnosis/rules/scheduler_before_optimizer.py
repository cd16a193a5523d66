"""A scheduler that is stepped before the optimizer."""

from __future__ import annotations

from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find a scheduler whose counter had risen before the first step of the optimizer was over."""
    counter = case.scalar("scheduler.last_epoch")
    scheduler = case.facts.scheduler
    if counter is None or scheduler is None:
        raise NotMeasured("scheduler.last_epoch")
    steps, counts = counter
    before = scheduler.settings.get("last_epoch")
    if steps[0] != 1 or before != 0 or counts[0] < 1:
        return None
    return RULE.finding(
        case,
        "warning",
        0.9,
        sites=("scheduler",),
        step=1,
        evidence=(
            fact("the scheduler's counter when the run began", 0),
            above("the same at the end of the first step", counts[0], 1, "scheduler.last_epoch:scalar mean"),
        ),
        cause="scheduler.step() is called before optimizer.step(): the first value of the schedule is never used.",
        fix="Call optimizer.step() first, then scheduler.step().",
        refute="Print scheduler.last_epoch right after the first optimizer.step(): 0 refutes it.",
    )


RULE = Rule(kind="scheduler_before_optimizer", check=check, since=2)
