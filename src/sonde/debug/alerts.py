"""Alerts: what the parts of a debug session report. Each one presents a `Finding`."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Generic, TypeVar

from sonde.records import Evidence, Finding, Severity

MAX_ALERTS: Final = 1000
"""How many alerts a part keeps; the oldest are dropped first."""
LEVELS: Final[dict[str, int]] = {"info": logging.INFO, "warning": logging.WARNING, "critical": logging.CRITICAL}
"""By severity: the level at which an alert is logged."""
_WORD: Final = "alert"


@dataclass(frozen=True, slots=True)
class Alert:
    """Something that went wrong: a finding, in the words of the part of the session that reports it."""

    finding: Finding
    source: ClassVar[str] = "finding"

    @property
    def kind(self) -> str:
        """What happened, in one word."""
        return str(self.finding.data.get(_WORD, self.finding.kind))

    @property
    def severity(self) -> Severity:
        """`info`, `warning` or `critical`."""
        return self.finding.severity

    @property
    def message(self) -> str:
        """What happened, in a sentence."""
        return self.finding.cause

    @property
    def fix(self) -> str:
        """What to do about it; empty if that depends on where it comes from."""
        return self.finding.fix

    @property
    def step(self) -> int:
        """When it happened."""
        return self.finding.step

    @property
    def layer(self) -> str | None:
        """Where it happened; None for the training as a whole."""
        return next(iter(self.finding.sites), None)

    def to_json(self) -> dict[str, Any]:
        """Return the alert as JSON-ready values."""
        named = {
            name: getattr(self, name) for name in ("source", "kind", "severity", "message", "step", "layer", "fix")
        }
        return named | {name: value for name, value in self.finding.data.items() if name != _WORD}


class GradientAlert(Alert):
    """A problem of a layer's gradient, reported when it begins."""

    source = "gradient"
    __slots__ = ()

    @property
    def norm(self) -> float:
        """The norm of the gradient at that step."""
        return float(self.finding.data["norm"])


class TensorAlert(Alert):
    """A problem of an inspected tensor."""

    source = "tensor"
    __slots__ = ()

    @property
    def id(self) -> str:
        """The id of the inspection."""
        return str(self.finding.data["id"])

    @property
    def name(self) -> str:
        """The name of the tensor."""
        return str(self.finding.data["name"])

    @property
    def timestamp(self) -> float:
        """When the tensor was inspected, in seconds since the epoch."""
        return float(self.finding.data["timestamp"])


class DiagnosticAlert(Alert):
    """A problem of the training as a whole, reported when it begins."""

    source = "diagnostics"
    __slots__ = ()


class PerformanceAlert(Alert):
    """A bottleneck."""

    source = "performance"
    __slots__ = ()


A = TypeVar("A", bound=Alert)


class AlertBook(Generic[A]):
    """Keeps the last alerts of a part, and reports each problem when it begins.

    Args:
        on_alert: Called with every alert.

    """

    def __init__(self, on_alert: Callable[[A], None] | None = None) -> None:
        self._alerts: deque[A] = deque(maxlen=MAX_ALERTS)
        self._open: dict[str, set[str]] = {}
        self._on_alert = on_alert

    def __len__(self) -> int:
        return len(self._alerts)

    def add(self, alert: A) -> None:
        """Keep an alert and report it."""
        self._alerts.append(alert)
        if self._on_alert is not None:
            self._on_alert(alert)

    def update(self, subject: str, now: Mapping[str, A]) -> None:
        """Report those problems of a subject that it did not have before; one that comes back is reported again."""
        new = sorted(now.keys() - self._open.get(subject, set()))
        if now:
            self._open[subject] = set(now)
        else:
            self._open.pop(subject, None)
        for kind in new:
            self.add(now[kind])

    def all(self) -> list[A]:
        """Return the last alerts, oldest first."""
        return list(self._alerts)

    def forget(self, subject: str) -> None:
        """Forget which problems a subject has."""
        self._open.pop(subject, None)

    def clear(self) -> None:
        """Forget everything."""
        self._alerts.clear()
        self._open.clear()


def make_finding(
    kind: str,
    severity: Severity,
    message: str,
    *,
    step: int,
    site: str | None = None,
    fix: str = "",
    evidence: tuple[Evidence, ...] = (),
    word: str = "",
    **data: Any,
) -> Finding:
    """Return the finding of a check of one step. `word` is what the reporting part calls it, if not `kind`."""
    return Finding(
        kind=kind,
        severity=severity,
        exact=True,  # it states what was measured at that step
        step=step,
        last_step=step,
        sites=() if site is None else (site,),
        evidence=evidence,
        cause=message,
        fix=fix,
        data={_WORD: word or kind, **data},
    )
