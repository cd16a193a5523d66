"""What a debug session came to."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sonde import strict_json
from sonde.errors import OptionError
from sonde.records import Finding

IssueSeverity = Literal["info", "warning", "critical"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """Something that is wrong."""

    severity: IssueSeverity
    source: Literal["finding", "gradient", "tensor", "diagnostics", "performance"]
    message: str
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugSummary:
    """A report in short."""

    session_id: str
    total_issues: int
    critical_issues: int
    issues: tuple[str, ...]
    recommendations: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugReport:
    """Everything a session knows. Awaiting it gives it back, so that `await session.stop()` is right everywhere."""

    session_id: str
    run: str | None
    """The run that was recorded; None if nothing was kept."""
    rank: int = 0
    """Which process of a distributed training this is about."""
    steps: int
    issues: tuple[Issue, ...]
    findings: tuple[Finding, ...]
    tensors: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, Any] = field(default_factory=dict)
    diagnostics: dict[str, Any] = field(default_factory=dict)
    performance: dict[str, Any] = field(default_factory=dict)
    hooks: dict[str, Any] = field(default_factory=dict)
    recommendations: tuple[str, ...] = ()
    dashboard: str | None = None

    def summary(self) -> DebugSummary:
        """Return the report in short, the gravest issues first."""
        order = {"critical": 0, "warning": 1, "info": 2}
        issues = sorted(self.issues, key=lambda issue: order[issue.severity])
        return DebugSummary(
            session_id=self.session_id,
            total_issues=len(issues),
            critical_issues=sum(issue.severity == "critical" for issue in issues),
            issues=tuple(issue.message for issue in issues),
            recommendations=self.recommendations,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-ready values."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        plain["issues"] = [{name: getattr(issue, name) for name in issue.__slots__} for issue in self.issues]
        plain["findings"] = [finding.to_json() for finding in self.findings]
        return plain

    def save(self, path: str | Path) -> Path:
        """Write the report as strict JSON; return its path."""
        target = Path(path)
        if target.is_dir():
            raise OptionError(f"{target} is a folder; name the file to write, such as {target / 'report.json'}.")
        target.parent.mkdir(parents=True, exist_ok=True)
        strict_json.write(target, self.to_json(), indent=2, sync=False)
        return target

    def __await__(self) -> Generator[Any, None, DebugReport]:
        yield from ()
        return self
