"""A report for programs: strict JSON."""

from __future__ import annotations

import json
from typing import Any, Final

from sonde.analysis import LayerSummary
from sonde.views.plain import plain
from sonde.views.report.content import Report

VERSION: Final = 1


def to_json(report: Report) -> str:
    """Write a report as JSON that any parser takes; what is not known is null."""
    return json.dumps(plain(describe(report)), allow_nan=False, ensure_ascii=False, indent=1) + "\n"


def describe(report: Report) -> dict[str, Any]:
    """Return a report as plain values."""
    return {
        "report_version": VERSION,
        "run": report.facts,
        "ending": report.ending,
        "findings": [finding.to_json() for finding in report.findings],
        "metrics": [{"name": metric.name, **plain(metric.trend)} for metric in report.metrics],
        "layers": [_layer(layer) for layer in report.layers],
        "gradient_flow": [
            {"layer": row.name, "gradient": row.gradient, "update_ratio": row.ratio} for row in report.flow
        ],
        "phases": report.phases,
        "events": report.events,
        "problems": report.problems,
        "environment": report.environment,
        "config": report.config,
    }


def _layer(layer: LayerSummary) -> dict[str, Any]:
    values = {quantity: {"statistic": row.stat, "now": row.now} for quantity, row in layer.sites.items()}
    mark = layer.mark
    return {
        "layer": layer.name,
        "kind": layer.kind,
        "level": mark.level,
        "reason": mark.reason,
        "since_step": mark.step,
        "site": layer.worst.site.key,
        "values": values,
    }
