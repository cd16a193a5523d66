"""What a report says about a run, read once and written as HTML, Markdown or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np

from sonde import vitals
from sonde.analysis import Ending, FlowRow, LayerSummary, RunFacts, Trend, describe
from sonde.records import SEVERITIES, Event, Finding
from sonde.store import Run, Series
from sonde.views.terminal.summary import Page, read_page

TRACEBACK_IS: Final = "The traceback is in the run's events.jsonl."
TRACEBACK_LINES: Final = 20
_SETTINGS: Final = ("optimizer", "scheduler", "process.", "system.")


@dataclass(frozen=True, slots=True)
class Metric:
    """A scalar that was logged, and how it went."""

    name: str
    trend: Trend


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """A part of the step and the mean of its seconds."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """All that a report says, as plain values."""

    facts: RunFacts
    created: str
    ending: Ending | None
    """How it ended, if it did not finish."""
    findings: list[Finding]
    metrics: list[Metric]
    layers: list[LayerSummary]
    flow: list[FlowRow]
    phases: list[PhaseTime]
    events: list[Event]
    problems: list[str]
    environment: dict[str, Any]
    config: dict[str, Any]


def read_report(run: Run) -> Report:
    """Read what the report says."""
    page: Page = read_page(run)
    return Report(
        facts=page.facts,
        created=_time(run.header.created),
        ending=page.ending,
        findings=ranked(run.findings),
        metrics=_metrics(run),
        layers=page.layers,
        flow=page.flow,
        phases=_phases(run),
        events=page.events,
        problems=run.problems,
        environment=run.header.environment,
        config=run.header.config,
    )


def _time(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return "at no time a calendar knows"


def ranked(findings: Sequence[Finding]) -> list[Finding]:
    """Sort findings: the gravest first, then the surest, then the earliest."""
    return sorted(findings, key=lambda each: (-SEVERITIES.index(each.severity), -each.confidence, each.step))


def _metrics(run: Run) -> list[Metric]:
    sites = [site for site in run.sites if site.quantity == "scalar" and not site.name.startswith(_SETTINGS)]
    found = []
    for site in sites:
        series = run.series(site, "value")
        if len(series.steps):
            found.append(Metric(site.key.replace(":scalar", ""), describe(series.steps, series.values)))
    return found


def _phases(run: Run) -> list[PhaseTime]:
    known = {site.key: site for site in run.sites if site.quantity == "vital"}
    names = {vitals.DATA_WAIT: "waiting for data"} | {vitals.time_of(name): name for name in vitals.PHASE_TIMES}
    seconds: dict[str, Series] = {}
    for part, name in names.items():
        site = known.get(f"{vitals.LOOP}:vital{vitals.part_of(part)}")
        if site is not None:
            series = run.series(site, "mean")
            if np.isfinite(series.values).any():
                seconds[name] = series
    # A part that did not occur in a step took no time in it.
    steps = np.unique(np.concatenate([series.steps for series in seconds.values()])) if seconds else ()
    return [PhaseTime(name, float(np.nansum(series.values)) / len(steps)) for name, series in seconds.items()]


def ending_words(ending: Ending) -> str:
    """Say how a training ended that did not finish, and at which step.

    >>> ending_words(Ending("The training was interrupted.", 40, by_hand=True))
    'At step 40: The training was interrupted.'
    """
    words = ending.text if ending.text.endswith(".") else f"{ending.text}."
    return words if ending.step is None else f"At step {ending.step:,}: {words}"


def traceback_end(ending: Ending) -> str:
    """Return the last lines of the traceback, without what cannot be printed; nothing if the training was stopped."""
    trace = "" if ending.by_hand else ending.traceback or ""
    lines = ["".join(sign if sign.isprintable() else " " for sign in line) for line in trace.splitlines()]
    return "\n".join(lines[-TRACEBACK_LINES:])


def words_of(kind: str) -> str:
    """Return the name of a finding as words.

    >>> words_of("missing_zero_grad")
    'Missing zero grad'
    """
    return kind.replace("_", " ").capitalize()


def where_and_when(finding: Finding) -> str:
    """Say which steps a finding was seen at."""
    if finding.step == finding.last_step:
        return f"at step {finding.step:,}"
    return f"steps {finding.step:,} to {finding.last_step:,}"


def evidence_line(name: str, value: float, relation: str | None, threshold: float | None) -> str:
    """Write one piece of evidence.

    >>> evidence_line("share left over", 1.0, ">=", 0.9)
    'share left over: 1 (>= 0.9)'
    """
    held = f" ({relation} {threshold:.4g})" if relation is not None and threshold is not None else ""
    return f"{name}: {value:.4g}{held}"
