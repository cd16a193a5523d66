"""The same batch at every step."""

from __future__ import annotations

from sonde import vitals
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
    # Who tests on purpose fetches the batch once; who asks the loader at every step means to get others.
    waits = case.vital(vitals.LOOP, vitals.DATA_WAIT)
    asked = waits is not None and len(waits) >= 0.8 * len(known)
    return RULE.finding(
        case,
        "warning" if asked else "info",
        0.9,
        sites=("loader",),
        step=int(track.steps[0]),
        evidence=(
            above("steps with the same batch", len(known), 10, f"{track.key} mean"),
            fact("steps at which the loader was asked for a batch", 0 if waits is None else len(waits)),
        ),
        cause="Every step asks the loader and gets the same batch: it is started anew each time."
        if asked
        else "Every step sees the same batch, as in full-batch training or when testing whether it can be learnt.",
        fix="If it is not meant, draw batches in the loop: next(iter(loader)) starts anew each time.",
        refute="Compare two batches element by element: a difference refutes it.",
    )


RULE = Rule(kind="same_batch_every_step", check=check, since=10)
