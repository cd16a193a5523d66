"""Cause before symptom: which findings explain which others.

A symptom that a cause explains is not listed beside it; it is folded under it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from sonde.records import Finding
from sonde.store.findings import rank

OUTCOMES: Final = frozenset(
    {
        "loss_plateau",
        "loss_oscillation",
        "loss_spike",
        "loss_divergence",
        "not_learning",
        "underfitting",
    }
)
"""What any disease can lead to: reported on its own only if nothing else was found."""

EXPLAINS: dict[str, frozenset[str]] = {}
"""By cause: the kinds that follow from it, besides the outcomes, which follow from every warning."""


def explains(cause: Finding, symptom: Finding) -> bool:
    """Say whether one finding accounts for another."""
    if cause.kind == symptom.kind:
        return False
    if symptom.kind in EXPLAINS.get(cause.kind, ()):
        return True
    return symptom.kind in OUTCOMES and cause.kind not in OUTCOMES and cause.severity != "info"


def fold(findings: list[Finding]) -> list[Finding]:
    """Fold symptoms under their causes and return what is left, best first."""
    ordered = sorted(findings, key=rank)
    folded = {
        symptom.kind
        for symptom in ordered
        if any(explains(cause, symptom) and not _is_circular(cause, symptom) for cause in ordered)
    }
    kept = []
    for finding in ordered:
        if finding.kind in folded:
            continue
        under = _under(finding, ordered, folded)
        kept.append(replace(finding, explains=tuple(sorted(under))) if under else finding)
    return kept


def _under(cause: Finding, findings: list[Finding], folded: set[str]) -> set[str]:
    """Return the folded kinds that a cause explains, also through one another."""
    under: set[str] = set()
    open_causes = [cause]
    while open_causes:
        current = open_causes.pop()
        for symptom in findings:
            if symptom.kind in folded and symptom.kind not in under and explains(current, symptom):
                under.add(symptom.kind)
                open_causes.append(symptom)
    return under


def _is_circular(cause: Finding, symptom: Finding) -> bool:
    """Two that explain each other: the better of them stays."""
    return explains(symptom, cause) and rank(symptom) < rank(cause)
