"""Batches in which no target counts."""

from __future__ import annotations

from sonde import vitals
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.nonfinite import READINGS, TOLD_FROM
from sonde.diagnosis.rule import Rule, below, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find a batch whose targets are all ignore_index: the mean over none of them is not a number."""
    tracks = case.vitals(vitals.VALID_TARGETS)
    if not tracks:
        raise NotMeasured("loss_fn:vital.valid_targets")
    for track in tracks:
        empty = track.numbers() == 0
        if not empty.any():
            continue
        step = int(track.steps[empty][0])
        output = case.track(f"{vitals.LOSS}:output")
        broken = output is not None and bool((output.stat("nonfinite") > 0).any())
        return RULE.finding(
            case,
            "critical" if broken else "warning",
            0.98,
            sites=("loader", vitals.LOSS),
            step=step,
            evidence=(
                below("targets of the batch that count", 0, 0, f"{track.key} mean"),
                fact("such batches among those looked at", int(empty.sum())),
            ),
            cause=f"In step {step} every target of the batch is ignore_index: the loss averages over nothing"
            + (", which is NaN." if broken else "."),
            fix="Leave such samples out when the data is made, or skip the batch; reduction='sum' divided by "
            "max(1, number of valid targets) is safe too.",
            refute="Count targets != ignore_index in that batch: any refutes it.",
            data={TOLD_FROM: READINGS},
        )
    return None


RULE = Rule(kind="empty_target", check=check, since=1, lasting=True)
