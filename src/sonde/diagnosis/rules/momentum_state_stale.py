"""An optimizer that has lost its state in the middle of a run."""

from __future__ import annotations

import numpy as np

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.fresh_step import fresh_steps
from sonde.diagnosis.resumed import boundaries
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find steps in the middle of a run that look like the first step of a fresh optimizer."""
    steps, fresh = fresh_steps(case)
    # Where every step moves all elements alike, that is how the optimizer works.
    if len(steps) < 4 or fresh[1:].mean() > 0.5:
        return None
    begins = boundaries(case)
    lost = [int(step) for step, before, now in zip(steps[1:], fresh[:-1], fresh[1:], strict=True) if now and not before]
    lost = [step for step in lost if step not in begins]
    if not lost:
        return None
    before = steps[np.searchsorted(steps, lost[0]) - 1]
    return RULE.finding(
        case,
        "warning",
        0.9,
        sites=("optimizer",),
        step=lost[0],
        evidence=(
            above("share of weights whose elements all moved by the learning rate", 1.0, thresholds.FRESH_STEP_WEIGHTS),
            fact("steps in which that happened", len(lost)),
            fact("the step before", int(before)),
        ),
        cause=f"In step {lost[0]} the optimizer began anew: every element moved by just the learning rate, as only a "
        "fresh Adam does. Its moments were lost.",
        fix="Make the optimizer once, outside the loop over epochs; load its state_dict together with the model's.",
        refute="Print optimizer.state[p]['step'] around that step: if it goes on counting, it is wrong.",
        data={"steps": lost[:16], "loop": vitals.LOOP},
    )


RULE = Rule(kind="momentum_state_stale", check=check, since=4)
