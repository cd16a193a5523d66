"""Units that begin equal and stay equal."""

from __future__ import annotations

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.rule import Rule, below, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find weights all of whose rows were equal at the start and still are after some steps that moved them."""
    case.need_facts()
    started = [
        each.name
        for each in case.facts.parameters
        if each.equal_rows and each.trainable and len(each.shape) >= 2 and each.shape[0] > 1
    ]
    if not started:
        return None
    spreads = {name: case.vital(name, vitals.ROW_SPREAD) for name in started}
    if all(track is None for track in spreads.values()):
        raise NotMeasured("parameter:vital.row_spread")
    equal = {}
    for name, track in spreads.items():
        # At the first look nothing may have moved yet; what counts is that training does not part them.
        if track is not None and len(track) >= 2 and track.steps[-1] >= 2 and _moved(case, name):
            spread = float(track.numbers()[-1])
            if spread <= thresholds.ROW_SPREAD.value:
                equal[name] = spread
    if not equal:
        return None
    name = next(iter(equal))
    return RULE.finding(
        case,
        "warning",
        0.95,
        sites=tuple(equal)[:6],
        step=int(case.history.first_step or 0),
        evidence=(
            below(
                "spread between rows over the spread of all",
                equal[name],
                thresholds.ROW_SPREAD,
                f"{name}:vital.row_spread mean",
            ),
            fact("weights like this", len(equal)),
        ),
        cause=f"All units of {name} began with the same weights and get the same gradient: the layer acts as one unit.",
        fix="Initialise it at random (kaiming_normal_, xavier_uniform_), not with a constant.",
        refute="Compare two rows of the weight: any difference beyond rounding refutes it.",
    )


def _moved(case: Case, name: str) -> bool:
    update = case.track(f"{name}:update")
    return update is None or bool((update.stat("norm") > 0).any())


RULE = Rule(kind="symmetric_init", check=check, since=3)
