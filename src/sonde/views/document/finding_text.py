"""The wording of a finding, shared by reports, the viewer and the doors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sonde.records import Finding, words_of
from sonde.store.timeline import rank_of_finding


def ranked(findings: Sequence[Finding]) -> list[Finding]:
    """Sort findings: the most severe first, then the most certain, then the earliest."""
    return sorted(findings, key=rank_of_finding)


def count_findings(findings: Sequence[Finding]) -> str:
    """Return how many findings and notes there are, in the words that all views use; a note has severity `info`.

    >>> count_findings([])
    'no findings'
    """
    notes = sum(finding.severity == "info" for finding in findings)
    grave = len(findings) - notes
    parts = [f"{number:,} {word}{'' if number == 1 else 's'}" for number, word in ((grave, "finding"), (notes, "note"))]
    shown = [part for part, number in zip(parts, (grave, notes), strict=True) if number]
    return " and ".join(shown) or "no findings"


def when(finding: Finding) -> str:
    """Return the steps at which a finding was observed, and how certain it is where that is known, as words."""
    if finding.step == finding.last_step:
        steps = f"at step {finding.step:,}"
    else:
        steps = f"steps {finding.step:,} to {finding.last_step:,}"
    return steps if finding.confidence is None else f"{steps}, confidence {finding.confidence:.0%}"


def evidence_line(name: str, value: float, relation: str | None, threshold: float | None) -> str:
    """Write one piece of evidence.

    >>> evidence_line("share left over", 1.0, ">=", 0.9)
    'share left over: 1 (>= 0.9)'
    """
    limit = f" ({relation} {threshold:.4g})" if relation is not None and threshold is not None else ""
    return f"{name}: {value:.4g}{limit}"


def rows_of(finding: Finding) -> Iterator[tuple[str, list[str]]]:
    """Yield what there is to know about a finding: a label, and one line or several."""
    rows = {
        "Where": [", ".join(finding.sites)],
        "Cause": [finding.cause],
        "Fix": [finding.fix],
        "Evidence": [evidence_line(e.name, e.value, e.relation, e.threshold) for e in finding.evidence],
        "To prove it wrong": [finding.refute],
        "Explains": [", ".join(words_of(kind) for kind in finding.explains)],
    }
    for label, lines in rows.items():
        if any(lines):
            yield label, lines
