"""Evaluation on the data of training."""

from __future__ import annotations

import numpy as np

from sonde import schema
from sonde.diagnosis.batches import MIN_ELEMENTS, model_input
from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Rule, above, fact
from sonde.diagnosis.track import Track
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find evaluations whose inputs, taken together, are those that training saw since the one before."""
    train, evaluated = model_input(case), model_input(case, "eval")
    if train.name != evaluated.name:
        return None
    same = [step for at, step in enumerate(evaluated.steps.tolist()) if _is_same(train, evaluated, at)]
    if len(same) < 2 or 2 * len(same) < len(evaluated):
        return None
    named = [name for name in case.scalars() if name.lower().startswith(("val", "test", "dev"))]
    return RULE.finding(
        case,
        "warning" if named else "info",
        0.75,
        sites=("loader",),
        step=same[0],
        evidence=(
            above("evaluations on the very data of training", len(same), 2, f"{evaluated.key} mean"),
            fact("evaluations looked at", len(evaluated)),
        ),
        cause="Evaluation runs on the training data" + (f", though {named[0]} is reported from it." if named else "."),
        fix="Hold samples back that training never sees, and hand their loader to the evaluation.",
        refute="Intersect the indices of both sets: none in common refutes it.",
    )


def _is_same(train: Track, evaluated: Track, at: int) -> bool:
    """Say whether one evaluation saw what the training steps since the evaluation before saw."""
    row, step = evaluated.rows[at], int(evaluated.steps[at])
    start = int(evaluated.steps[at - 1]) if at else 0
    between = train.since(start + 1)
    between = Track(between.site, between.steps[between.steps <= step], between.rows[between.steps <= step])
    if not len(between) or row[schema.COUNT] < MIN_ELEMENTS or row[schema.M2] == 0:
        return False
    total = between.total()
    exact = [schema.COUNT, schema.MIN, schema.MAX, schema.ZERO]
    return bool(
        (total[exact] == row[exact]).all()
        and np.allclose(total[[schema.MEAN, schema.M2]], row[[schema.MEAN, schema.M2]], rtol=1e-5, atol=1e-9)
    )


RULE = Rule(kind="data_leakage", check=check, since=2)
