"""An optimizer that never steps, though backward passes run."""

from __future__ import annotations

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.ownership import by_number, few, held, need_optimizers
from sonde.diagnosis.rule import Rule, above, below
from sonde.facts import OptimizerFacts
from sonde.records import Evidence, Finding


def check(case: Case) -> Finding | None:
    """Find an optimizer that was never asked to step by the end of the run, or while others stepped for long."""
    optimizers = need_optimizers(case)
    stepped = {track.name for track in case.vitals(vitals.BACKWARDS_SEEN)}
    idle = [each for each in optimizers if each.name not in stepped]
    if not idle:
        return None
    if len(idle) == len(optimizers):
        return _nobody_steps(case, idle)
    if case.num_steps < thresholds.IDLE_STEPS.value:
        return None
    counted = above("steps of the other optimizers", case.num_steps, thresholds.IDLE_STEPS)
    return _finding(case, idle[0], counted=(counted,), confidence=0.75)


def _nobody_steps(case: Case, idle: list[OptimizerFacts]) -> Finding | None:
    track = case.vital(vitals.LOOP, vitals.BACKWARDS)
    if track is None:
        raise NotMeasured("(loop):vital.backwards")
    written = case.vital(vitals.LOOP, vitals.WRITTEN)
    if written is not None and written.numbers()[-1] > 0:
        return None  # somebody steps whom nobody watches
    passes = float(track.numbers().sum())
    if not case.final or passes < thresholds.NEVER_STEPPED.value:
        return None
    counted = above("backward passes until the run ended", passes, thresholds.NEVER_STEPPED, f"{track.key} mean")
    return _finding(case, idle[0], counted=(counted, below("steps of the optimizer", 0, 0)), confidence=0.95)


def _finding(case: Case, optimizer: OptimizerFacts, *, counted: tuple[Evidence, ...], confidence: float) -> Finding:
    return RULE.finding(
        case,
        "critical" if confidence > 0.9 else "warning",
        confidence,
        sites=(optimizer.name,),
        step=0,
        evidence=counted,
        cause=f"{optimizer.name} has never stepped: {few(held(optimizer))} "
        + by_number(held(optimizer), "stays as it was drawn.", "stay as they were drawn."),
        fix=f"Call {optimizer.name}.step() after loss.backward().",
        refute="Put a print into the branch that calls step(): if it is reached, this is wrong.",
    )


RULE = Rule(kind="step_not_called", check=check, since=0)
