"""The order of findings: causes first, with the symptoms that they explain folded under them."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from sonde.diagnosis.nonfinite import is_known_operation
from sonde.diagnosis.rules import RULES
from sonde.diagnosis.symptoms import NOT_FINITE, TOO_FAR
from sonde.records import Finding
from sonde.store.timeline import rank_of_finding

OUTCOMES: Final = frozenset(rule.kind for rule in RULES if rule.outcome)
"""What any fault can lead to: reported on its own only if nothing else was found."""
EXPLAINS: dict[str, frozenset[str]] = {
    **{rule.kind: rule.explains for rule in RULES},
    # Found by repeating the step, not by a rule.
    "fully_masked_attention": frozenset({*NOT_FINITE, "dead_relu", "loss_scale_collapse", "lr_too_high"}),
}
"""By cause: the kinds that follow from it, apart from outcomes, which follow from every warning."""


_FROM_NOT_FINITE: Final = frozenset({*TOO_FAR, "lr_too_high"}) - frozenset(NOT_FINITE)


_EFFECTS: Final = frozenset(
    {"saturated_activation", "dead_relu", "constant_output", "vanishing_gradient", "exploding_activation"}
    | {"exploding_gradient", "attention_entropy_collapse"}
)
"""What is never a cause by itself: something in the program makes activations and gradients so."""


def explains(cause: Finding, symptom: Finding) -> bool:
    """Return whether one finding accounts for another."""
    if cause.kind == symptom.kind or (cause.severity == "info" and symptom.severity != "info"):
        return False
    if is_known_operation(symptom) and cause.basis == "statistics":
        return False  # the operation has to be mended whatever the statistics say
    if is_known_operation(cause) and symptom.basis == "statistics" and symptom.kind in _FROM_NOT_FINITE:
        return True
    if symptom.kind in EXPLAINS.get(cause.kind, ()):
        return True
    return symptom.kind in OUTCOMES and cause.kind not in OUTCOMES and cause.severity != "info"


def fold(findings: list[Finding]) -> list[Finding]:
    """Fold symptoms under their causes and return what is left, best first."""
    ordered = sorted(_raised(findings), key=rank_of_finding)
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
        kept.append(_with(finding, under, ordered) if under else finding)
    return sorted(kept, key=rank_of_finding)


def _raised(findings: list[Finding]) -> list[Finding]:
    """Return findings in which a note that accounts for an effect is as severe as that effect."""
    effects = [each for each in findings if each.kind in _EFFECTS and each.severity != "info"]
    return [
        replace(each, severity=effects_of[0].severity)
        if each.severity == "info"
        and each.kind not in OUTCOMES | _EFFECTS
        and (effects_of := [effect for effect in effects if effect.kind in EXPLAINS.get(each.kind, ())])
        else each
        for each in findings
    ]


def _with(cause: Finding, under: set[str], findings: list[Finding]) -> Finding:
    """Return a cause with the symptoms folded under it, and where a non-finite number began."""
    begun = next((each.data for each in findings if each.kind in under and "origin" in each.data), {})
    data = {name: begun[name] for name in ("origin", "reason") if name in begun} | cause.data
    return replace(cause, explains=tuple(sorted(under)), data=data)


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
    """Return whether two findings explain each other and the symptom ranks higher."""
    return explains(symptom, cause) and rank_of_finding(symptom) < rank_of_finding(cause)
