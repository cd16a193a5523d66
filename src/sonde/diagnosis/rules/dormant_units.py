"""Units of a layer that are never used."""

from __future__ import annotations

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.rule import Rule, above
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find layers a third of whose rectifiers never fired, though enough work."""
    tracks = case.vitals(vitals.EVER_ACTIVE)
    if not tracks:
        raise NotMeasured("module:vital.ever_active")
    idle: list[tuple[float, float, str]] = []
    for track in tracks:
        seen = case.vital(track.name, vitals.UNIT_SAMPLES)
        samples = float(seen.numbers()[-1]) if seen is not None else 0.0
        share = 1 - float(track.numbers()[-1])
        dormant = thresholds.DORMANT_SHARE.value <= share < thresholds.DEAD_SHARE.value
        if dormant and samples >= thresholds.DORMANT_SAMPLES.value:
            idle.append((share, samples, track.name))
    if not idle:
        return None
    share, samples, name = max(idle)
    return RULE.finding(
        case,
        "info",
        0.8,
        sites=tuple(name for _, _, name in sorted(idle, reverse=True)[:4]),
        evidence=(
            above(
                "share of units that were never positive",
                share,
                thresholds.DORMANT_SHARE,
                f"{name}:vital.ever_active mean",
            ),
            above("values looked at per unit", samples, thresholds.DORMANT_SAMPLES),
        ),
        cause=f"{share:.0%} of the units of {name} have never been active: the layer is wider than what it uses.",
        fix="Make the layer narrower, lower the learning rate, or use LeakyReLU or GELU.",
        refute="Feed the whole training set: units that fire for any sample are in use.",
    )


RULE = Rule(kind="dormant_units", check=check, since=100)
