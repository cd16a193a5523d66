"""Weights that were meant to be one tensor and are two."""

from __future__ import annotations

import numpy as np

from sonde import measures
from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Evidence, Finding


def check(case: Case) -> Finding | None:
    """Find two weights that the model's settings call one, or that are equal though of layers of another class.

    Layers of the same class that are equal are copies of a block, which is how torch makes its encoders.
    """
    facts = case.need_facts()
    pairs = [(pair, 0.97) for pair in facts.tied]
    for each in facts.parameters:
        for other in each.equal_to:
            twin = case.parameters.get(other)
            if twin is not None and each.name < other and each.kind != twin.kind and each.trainable and twin.trainable:
                pairs.append(((each.name, other), 0.92))
    if not pairs:
        return None
    (one, two), confidence = pairs[0]
    return RULE.finding(
        case,
        "warning",
        confidence,
        sites=(one, two),
        step=0,
        evidence=(above("pairs of weights that are equal in separate memory", len(pairs), 1), *_drift(case, one, two)),
        cause=f"{one} and {two} began as copies but are two tensors: tied weights drift apart as they train.",
        fix=f"Assign the parameter itself, as in head.weight = embedding.weight, not a copy of its values ({two} is a "
        "clone); do it again after anything that makes new parameters.",
        refute="If a.data_ptr() == b.data_ptr() for the two, they are tied.",
    )


def _drift(case: Case, one: str, two: str) -> tuple[Evidence, ...]:
    tracks = [case.track(f"{name}:parameter") for name in (one, two)]
    if any(track is None for track in tracks):
        return ()
    norms = [float(measures.norm(track.rows[-1])) for track in tracks if track is not None]
    apart = abs(norms[0] - norms[1]) / max(norms[0], norms[1], np.finfo(float).tiny)
    return (fact("difference of their norms by now, as a part of the larger", apart, f"{one}:parameter norm"),)


RULE = Rule(kind="tied_weights_broken", check=check, since=1)
