"""Puts together what the parts of a debug session came to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from sonde.debug.gradient_debugger import GradientDebugger
from sonde.debug.model_diagnostics import ModelDiagnostics
from sonde.debug.report import DebugReport, Issue
from sonde.debug.tensor_inspector import TensorInspector

if TYPE_CHECKING:
    from sonde.debug.session import DebugSession


def make_report(
    session: DebugSession,
    gradients: GradientDebugger,
    inspector: TensorInspector,
    diagnostics: ModelDiagnostics,
    dashboard: str | None,
) -> DebugReport:
    """Return the report of a session as of now."""
    analysis = gradients.analyze_gradient_flow()
    advice = [finding.fix for finding in session.findings if finding.severity != "info"]
    advice += [*analysis.recommendations, *diagnostics.analyze_training_dynamics().recommendations]
    advice += session.profiler.suggestions()
    return DebugReport(
        session_id=session.id,
        run=None if session.kept_in is None else str(session.kept_in),
        rank=session.rank,
        steps=session.step,
        issues=tuple(_issues(session, gradients, inspector, diagnostics)),
        findings=tuple(session.findings),
        tensors=inspector.generate_report(),
        gradients=asdict(analysis),
        diagnostics=diagnostics.generate_report(),
        performance=session.profiler.generate_report(),
        hooks={name: asdict(statistics) for name, statistics in session.hooks.get_statistics().items()},
        recommendations=tuple(dict.fromkeys(advice)),
        dashboard=dashboard,
    )


def _issues(
    session: DebugSession, gradients: GradientDebugger, inspector: TensorInspector, diagnostics: ModelDiagnostics
) -> Iterator[Issue]:
    for finding in session.findings:
        yield Issue(severity=finding.severity, source="finding", message=finding.cause, fix=finding.fix)
    for alert in gradients.get_alerts():
        grave = alert.kind in ("nonfinite", "exploding")
        yield Issue(severity="critical" if grave else "warning", source="gradient", message=alert.message)
    for tensor in inspector.get_alerts():
        yield Issue(severity=tensor.severity, source="tensor", message=tensor.message)
    for told in diagnostics.get_alerts():
        yield Issue(severity=told.severity, source="diagnostics", message=told.message)
    for slow in session.profiler.analyze_performance():
        yield Issue(severity="warning", source="performance", message=slow.message, fix=slow.suggestion)
