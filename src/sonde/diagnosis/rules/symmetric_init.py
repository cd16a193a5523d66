"""Units that begin equal and stay equal."""

from __future__ import annotations

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.outlook import is_learning_well
from sonde.diagnosis.rule import Rule, fact
from sonde.facts import ParameterFacts
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find weights all of whose rows were equal at the start: to a constant that is not zero, or equal to this day."""
    case.need_facts()
    started = [
        each
        for each in case.facts.parameters
        if each.equal_rows and each.trainable and len(each.shape) >= 2 and each.shape[0] > 1 and _is_layer(each)
    ]
    together = {each.name: spread for each in started if (spread := _spread(case, each.name)) is not None}
    equal = [name for name, spread in together.items() if spread <= thresholds.ROWS_APART.value]
    # Zeros are how residual branches, adapters and heads begin; any other constant is a mistake.
    alike = equal or [each.name for each in started if not each.zero]
    if not alike:
        return None
    stuck = bool(equal)
    name = alike[0]
    # One layer may be an average by design; several that begin as constants are not.
    several = len(alike) > 1
    return RULE.finding(
        case,
        "warning" if stuck or several or not is_learning_well(case) else "info",
        0.95 if stuck else 0.85,
        sites=tuple(alike[:6]),
        step=int(case.history.first_step or 0),
        evidence=(
            fact("weights that began with all rows equal", len(alike)),
            fact("spread between rows over the spread of all, now", together.get(name, float("nan"))),
        ),
        cause=f"All units of {name} began with the same weights: they get almost the same gradient, and the layer acts "
        "as one unit.",
        fix="Initialise it at random (kaiming_normal_, xavier_uniform_), not with a constant.",
        refute="Train 50 steps from random weights: if the loss behaves the same, it is not this.",
    )


def _is_layer(parameter: ParameterFacts) -> bool:
    return any(word in parameter.kind for word in ("Linear", "Conv", "RNN", "LSTM", "GRU", "Attention"))


def _spread(case: Case, name: str) -> float | None:
    """Return how far rows are apart after some steps that moved the weight; None if that is not known."""
    track, update = case.vital(name, vitals.ROW_SPREAD), case.track(f"{name}:update")
    moved = update is None or bool((update.stat("norm") > 0).any())
    if track is None or track.steps[-1] < 2 or not moved:
        return None
    return float(track.numbers()[-1])


RULE = Rule(kind="symmetric_init", check=check, since=3)
