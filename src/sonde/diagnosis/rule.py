"""What a rule is: the name of a disease and a function that looks for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sonde.diagnosis.case import Case
from sonde.diagnosis.thresholds import Threshold
from sonde.records import Evidence, Finding, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One disease. `check` returns a finding, or None where the patient is well in this respect.

    It raises `NotMeasured` where the run lacks what it needs. It looks only at its argument, never at files, clocks or
    torch, and gives the same answer for the same case.
    """

    kind: str
    check: Callable[[Case], Finding | None]
    since: int = 1
    """How many steps must have been recorded before it makes sense to look; 0 looks as soon as facts are known."""
    final: bool = False
    """Whether it can only be told when the run is over."""
    lasting: bool = False
    """Whether it stays true once it was found: something that happened, not a state that may pass."""

    def finding(
        self,
        case: Case,
        severity: Severity,
        confidence: float,
        *,
        cause: str,
        fix: str,
        refute: str,
        sites: tuple[str, ...] = (),
        evidence: tuple[Evidence, ...] = (),
        step: int | None = None,
        data: dict[str, Any] | None = None,
    ) -> Finding:
        """Make a finding of this rule's kind; `step` is where it began, the present step if that is not known."""
        return Finding(
            kind=self.kind,
            severity=severity,
            confidence=confidence,
            step=case.step if step is None else step,
            last_step=case.step,
            sites=sites,
            evidence=evidence,
            cause=cause,
            fix=fix,
            refute=refute,
            data=data or {},
        )


def above(name: str, value: float, threshold: Threshold | float, series: str = "") -> Evidence:
    """Return evidence that a value reaches its threshold."""
    return Evidence(name=name, value=float(value), threshold=_number(threshold), relation=">=", series=series)


def below(name: str, value: float, threshold: Threshold | float, series: str = "") -> Evidence:
    """Return evidence that a value does not exceed its threshold."""
    return Evidence(name=name, value=float(value), threshold=_number(threshold), relation="<=", series=series)


def fact(name: str, value: float, series: str = "") -> Evidence:
    """Return evidence that is a number to know, without a threshold."""
    return Evidence(name=name, value=float(value), series=series)


def _number(threshold: Threshold | float) -> float:
    return threshold.value if isinstance(threshold, Threshold) else float(threshold)
