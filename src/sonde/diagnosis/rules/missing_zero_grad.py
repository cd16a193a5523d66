"""Gradients that still hold those of the step before."""

from __future__ import annotations

from typing import Final

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured, longest_run
from sonde.diagnosis.rule import Rule, above
from sonde.records import Finding

RECENT: Final = 64
MOST: Final = 0.5


def check(case: Case) -> Finding | None:
    """Find an optimizer whose gradients were not cleared between most of its steps, several times in a row."""
    tracks = case.vitals(vitals.LEFTOVER)
    if not tracks:
        raise NotMeasured("optimizer:vital.leftover")
    for track in tracks:
        # Clearing once an epoch is as wrong as never: the stretches between count.
        track = track.last(RECENT)
        shares = track.numbers()
        left_over = shares >= thresholds.LEFTOVER_SHARE.value
        longest = longest_run(left_over)
        if longest >= thresholds.LEFTOVER_STEPS.value and left_over.mean() > MOST:
            return RULE.finding(
                case,
                "critical",
                0.99,
                sites=(track.name,),
                step=int(track.steps[left_over][0]),
                evidence=(
                    above(
                        "share of parameters whose gradient still held the last step's when the next was added",
                        shares[left_over][-1],
                        thresholds.LEFTOVER_SHARE,
                        f"{track.key} mean",
                    ),
                    above("steps in a row", longest, thresholds.LEFTOVER_STEPS),
                ),
                cause=f"Gradients are not cleared between steps: each step of {track.name} applies the "
                "sum of those before.",
                fix="Call optimizer.zero_grad() once per step, before loss.backward().",
                refute="Compare p.grad after backward with that of a fresh copy of the model on the same batch: equal "
                "gradients refute it.",
            )
    return None


RULE = Rule(kind="missing_zero_grad", check=check, since=3)
