"""The same batch at every step."""

from __future__ import annotations

from sonde.diagnosis.batches import identities, model_input
from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find a run that was fed one batch only."""
    track = model_input(case)
    known = identities(track)
    if len(known) < 10 or known[0] == -1 or (known != known[0]).any():
        return None
    loader = case.facts.loader
    length = None if loader is None else loader.settings.get("length")
    if length == 1:  # the batch is the whole set
        return None
    return RULE.finding(
        case,
        "info",
        0.9,
        sites=("loader",),
        step=int(track.steps[0]),
        evidence=(
            above("steps with the same batch", len(known), 10, f"{track.key} mean"),
            fact("batches of the loader", float("nan") if not isinstance(length, int) else length),
        ),
        cause="Every step sees the same batch. That is right for full-batch training or to test whether a model can "
        "learn one batch by heart.",
        fix="If it is not meant, draw batches in the loop: next(iter(loader)) starts anew each time.",
        refute="Compare two batches element by element: a difference refutes it.",
    )


RULE = Rule(kind="same_batch_every_step", check=check, since=10)
