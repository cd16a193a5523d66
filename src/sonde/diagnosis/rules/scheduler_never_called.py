"""A scheduler that was made and is never stepped."""

from __future__ import annotations

from typing import Final

from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding

_PER_STEP: Final = frozenset({"OneCycleLR", "CyclicLR"})


def check(case: Case) -> Finding | None:
    """Find a scheduler whose counter has not moved when it should have."""
    counter = case.scalar("scheduler.last_epoch")
    if counter is None:
        raise NotMeasured("scheduler.last_epoch")
    steps, counts = counter
    rate = case.learning_rate()
    if counts.max() != counts.min() or (rate is not None and rate[1].max() != rate[1].min()):
        return None
    taken = int(steps[-1] - steps[0] + 1)
    confidence = _confidence(case, taken)
    if confidence is None:
        return None
    return RULE.finding(
        case,
        "warning",
        confidence,
        sites=("scheduler",),
        step=int(steps[0]),
        evidence=(
            fact("calls of scheduler.step() so far", 0, "scheduler.last_epoch:scalar mean"),
            above("optimizer steps", taken, thresholds.SCHEDULER_IDLE_STEPS),
        ),
        cause="The learning-rate scheduler is never stepped: the rate stays where the scheduler put it at the start.",
        fix="Call scheduler.step() after optimizer.step(), once per batch or per epoch as the schedule was made.",
        refute="Print scheduler.last_epoch at the end of an epoch: if it has risen, the scheduler is called.",
    )


def _confidence(case: Case, taken: int) -> float | None:
    if taken < thresholds.SCHEDULER_IDLE_STEPS.value:
        return None
    scheduler, loader = case.facts.scheduler, case.facts.loader
    if (scheduler is not None and scheduler.kind in _PER_STEP) or _is_held_low(case):
        return 0.95
    length = None if loader is None else loader.settings.get("length")
    epochs = sum(event.event_type == "epoch" for event in case.events)
    if epochs >= 3 or (isinstance(length, int) and length > 0 and taken > 2 * length + 1):
        return 0.95
    return 0.8 if case.final else None


def _is_held_low(case: Case) -> bool:
    """Say whether the rate waits at the foot of a warm-up."""
    rate = case.learning_rate()
    group = next((group for optimizer in case.facts.optimizers for group in optimizer.groups), None)
    initial = None if group is None else group.settings.get("initial_lr")
    return rate is not None and isinstance(initial, float) and rate[1][-1] < 0.5 * initial


RULE = Rule(kind="scheduler_never_called", check=check, since=int(thresholds.SCHEDULER_IDLE_STEPS.value))
