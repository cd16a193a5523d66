"""Sigmoids and tanhs that are driven far into their flat ends."""

from __future__ import annotations

import numpy as np

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.outlook import gravity
from sonde.diagnosis.rule import Rule, above, fact
from sonde.diagnosis.track import Track
from sonde.records import Finding, Severity


def check(case: Case) -> Finding | None:
    """Find layers most of whose inputs stay beyond +-5; the last module may be sure of itself."""
    tracks = case.vitals(vitals.SATURATED)
    if not tracks:
        raise NotMeasured("module:vital.saturated")
    last = case.facts.order[-1:]
    flat = [track for track in tracks if track.name not in last and _is_saturated(track)]
    if not flat:
        return None
    worst = max(flat, key=lambda track: float(track.numbers()[-1]))
    sources = {after: before for before, after in case.facts.edges}
    names = (name for track in flat[:4] for name in (sources.get(track.name, ""), track.name) if name)
    return RULE.finding(
        case,
        _severity(case, flat),
        0.8,
        sites=tuple(dict.fromkeys(names)),
        step=int(flat[0].steps[0]),
        evidence=(
            above("share of inputs beyond +-5", worst.numbers()[-1], thresholds.SATURATED_SHARE, f"{worst.key} mean"),
            fact("layers like this", len(flat)),
        ),
        cause=f"{worst.name} is saturated: most of its inputs lie where it is flat, so almost no gradient passes.",
        fix="Normalise the inputs, initialise with xavier_uniform_, put a norm in front, or use ReLU or GELU.",
        refute="Look at the histogram of its inputs: if most lie within +-5, it is not saturated.",
    )


def _is_saturated(track: Track) -> bool:
    looks = int(thresholds.SATURATED_LOOKS.value)
    return len(track) >= looks and bool(np.min(track.numbers()[-looks:]) > thresholds.SATURATED_SHARE.value)


def _severity(case: Case, flat: list[Track]) -> Severity:
    # A layer that was born flat has never been of use, however well the layers after it make do.
    born = any(float(track.numbers().min()) >= thresholds.SATURATED_BORN.value for track in flat)
    return "warning" if born else gravity(case)


RULE = Rule(kind="saturated_activation", check=check, since=5)
