"""Evaluation on the data of training."""

from __future__ import annotations

import numpy as np

from sonde import schema, vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.batches import MIN_ELEMENTS, model_input
from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Rule, above, below, fact
from sonde.diagnosis.track import Track
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find evaluations whose inputs, taken together or row by row, are those that training saw."""
    return _whole(case) or _rows(case)


def _whole(case: Case) -> Finding | None:
    train, evaluated = model_input(case), model_input(case, "eval")
    if train.name != evaluated.name:
        return None
    same = [step for at, step in enumerate(evaluated.steps.tolist()) if _is_same(train, evaluated, at)]
    if len(same) < 2 or 2 * len(same) < len(evaluated):
        return None
    named = _named(case)
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


def _rows(case: Case) -> Finding | None:
    """Find evaluations nearly all rows of which were trained on, where rows are not alike by nature."""
    name = model_input(case).name
    seen, repeated = case.vital(name, vitals.SEEN_ROWS, "eval"), case.vital(name, vitals.REPEATED_ROWS)
    if seen is None or repeated is None or len(seen) < 2:
        return None
    share, alike = float(seen.numbers().min()), float(repeated.numbers().max())
    if share < thresholds.SEEN_SHARE.value or alike > thresholds.ALIKE_SHARE.value:
        return None
    named = _named(case)
    return RULE.finding(
        case,
        "warning" if named else "info",
        0.85,
        sites=("loader",),
        step=int(seen.steps[0]),
        evidence=(
            above("share of the rows of each evaluation that were trained on", share, thresholds.SEEN_SHARE, seen.key),
            below("share of the rows of a batch that repeat another", alike, thresholds.ALIKE_SHARE, repeated.key),
            fact("evaluations looked at", len(seen)),
        ),
        cause="The rows that are evaluated were trained on"
        + (f", though {named[0]} is reported from them: it says how well they are known by heart." if named else "."),
        fix="Split the data before anything is drawn from it, and check that the indices of both parts have none in "
        "common; copies of a row belong to one part.",
        refute="Intersect the indices of both sets: none in common refutes it, unless rows are in the data twice.",
    )


def _named(case: Case) -> list[str]:
    """Return the names of numbers that are said to be of other data than training's."""
    return [name for name in case.scalars() if name.lower().startswith(("val", "test", "dev"))]


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


RULE = Rule(kind="data_leakage", check=check, since=2, lasting=True)
