"""The report of a debug session."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sonde.core import files
from sonde.debug.alerts import Alert
from sonde.debug.gradient_debugger import GradientDebugger
from sonde.debug.model_diagnostics import ModelDiagnostics
from sonde.debug.tensor_inspector import TensorInspector
from sonde.errors import OptionError
from sonde.records import Finding

if TYPE_CHECKING:
    from sonde.debug.session import DebugSession
    from sonde.views.document import Document


_MOST_ROWS: Final = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugSummary:
    """The summary of a report."""

    session_id: str
    total_issues: int
    critical_issues: int
    issues: tuple[str, ...]
    recommendations: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugReport:
    """Everything a session knows. It can be awaited, so that `await session.stop()` works."""

    session_id: str
    run: str | None
    """The run that was recorded; None if nothing was kept."""
    rank: int = 0
    """Which process of a distributed training this is about."""
    steps: int
    issues: tuple[Alert, ...]
    """What is wrong: findings on the run, what single steps showed, and what is slow."""
    findings: tuple[Finding, ...]
    tensors: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, Any] = field(default_factory=dict)
    diagnostics: dict[str, Any] = field(default_factory=dict)
    performance: dict[str, Any] = field(default_factory=dict)
    hooks: dict[str, Any] = field(default_factory=dict)
    recommendations: tuple[str, ...] = ()
    dashboard: str | None = None

    def summary(self) -> DebugSummary:
        """Return a summary, the most severe issues first."""
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
        plain["issues"] = [issue.to_json() for issue in self.issues]
        plain["findings"] = [finding.to_json() for finding in self.findings]
        return plain

    def document(self) -> Document:
        """Return the report as a document, to print or to write as HTML or Markdown."""
        # Imported here: a training that writes no such report needs none of it.
        from sonde.views.document import Block, Document, Findings, Section, Table, Text, Tiles
        from sonde.views.terminal.style import short

        tiles = {
            "steps": self.steps,
            "issues": len(self.issues),
            "critical": self.summary().critical_issues,
            "gradient health": self.gradients["overall_health"],
            "model health": self.diagnostics["health"]["status"],
        }
        flow, times = self.gradients["layers"], self.performance["layers"]
        layers = [[each["layer"], short(each["norm"]), each["health"], each["words"]] for each in flow]
        slow = [[name, each["type"], short(each["forward"]["mean"])] for name, each in times.items()]
        others = [[each.severity, each.source, each.message] for each in self.issues if each.source != "finding"]
        sections: dict[str, Sequence[Block]] = {
            "Findings": [Findings(self.findings)] if self.findings else [],
            "Other issues": [Table(("severity", "source", "message"), others, most=_MOST_ROWS)] if others else [],
            "What to do": [Text(text) for text in self.recommendations],
            "Gradients": [Table(("layer", "norm", "health", "words"), layers, (1,), _MOST_ROWS)] if layers else [],
            "Slowest layers": [Table(("layer", "class", "seconds"), slow, (2,), _MOST_ROWS)] if slow else [],
        }
        listed = [Section(title, blocks) for title, blocks in sections.items()]
        lead = Tiles([(name, str(value)) for name, value in tiles.items()])
        return Document(f"Debug session {self.session_id}", listed, [lead], data=self.to_json())

    def save(self, path: str | Path) -> Path:
        """Write the report and return its path; the suffix sets the format: `.html`, `.md`, else strict JSON."""
        target = Path(path)
        if target.is_dir():
            raise OptionError(f"{target} is a folder; name the file to write, such as {target / 'report.json'}.")
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix in (".html", ".md"):
            document = self.document()
            target.write_text(document.to_html() if target.suffix == ".html" else document.to_markdown(), "utf-8")
        else:
            files.write(target, self.to_json(), indent=2, sync=False)
        return target

    def __await__(self) -> Generator[Any, None, DebugReport]:
        yield from ()
        return self


def make_report(
    session: DebugSession,
    gradients: GradientDebugger,
    inspector: TensorInspector,
    diagnostics: ModelDiagnostics,
    dashboard: str | None,
) -> DebugReport:
    """Return the current report of a session."""
    analysis = gradients.analyze_gradient_flow()
    advice = [finding.fix for finding in session.findings if finding.severity != "info"]
    advice += [*analysis.recommendations, *diagnostics.analyze_training_dynamics().recommendations]
    advice += [f"{alert.message}: {alert.fix}" for alert in diagnostics.get_alerts() if alert.fix]
    advice += session.profiler.suggestions()
    if diagnostics.evaluation is not None:
        advice += diagnostics.evaluation.suggestions
    return DebugReport(
        session_id=session.id,
        run=None if session.kept_in is None else str(session.kept_in),
        rank=session.rank,
        steps=session.step,
        issues=(
            *map(Alert, session.findings),
            *gradients.get_alerts(),
            *inspector.get_alerts(),
            *diagnostics.get_alerts(),
            *(bottleneck.alert(session.step) for bottleneck in session.profiler.analyze_performance()),
        ),
        findings=tuple(session.findings),
        tensors=inspector.generate_report(),
        gradients=analysis.to_json(),
        diagnostics=diagnostics.generate_report(),
        performance=session.profiler.generate_report(),
        hooks={name: asdict(statistics) for name, statistics in session.hooks.get_statistics().items()},
        recommendations=tuple(dict.fromkeys(text for text in advice if text)),
        dashboard=dashboard,
    )
