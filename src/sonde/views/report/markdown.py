"""A report as Markdown: for pull requests, issues and notes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Final

from sonde.records import Finding
from sonde.views.plain import plain
from sonde.views.report.content import (
    TRACEBACK_IS,
    Report,
    ending_words,
    evidence_line,
    traceback_end,
    where_and_when,
    words_of,
)
from sonde.views.terminal.numbers import count, duration, plural, short, size

_MARKUP: Final = re.compile(r"([\\`*_\[\]|~])")
MOST_LAYERS: Final = 15
MOST_EVENTS: Final = 20


def text(value: object) -> str:
    r"""Return a text that Markdown shows as it is, on one line.

    >>> print(text("a|b <i>"))
    a\|b &lt;i&gt;
    """
    line = " ".join("".join(sign if sign.isprintable() else " " for sign in str(value)).split())
    return _MARKUP.sub(r"\\\1", line).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def to_markdown(report: Report) -> str:
    """Write a report."""
    return "\n".join(_lines(report)).rstrip() + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield f"# {text(report.facts.name)}"
    yield ""
    yield _summary(report)
    yield ""
    yield from _ending(report)
    yield "## Findings"
    yield ""
    if not report.findings:
        yield "No finding was recorded in this run."
        yield ""
    for finding in report.findings:
        yield from _finding(finding)
    yield from _metrics(report)
    yield from _layers(report)
    yield from _phases(report)
    yield from _events(report)
    yield from _details(report)


def _summary(report: Report) -> str:
    facts = report.facts
    parts = [facts.status, plural(facts.num_steps, "step")]
    parts += [f"in {duration(facts.seconds)}"] if facts.seconds is not None else []
    parts += [text(facts.model)] if facts.model else []
    parts += [f"{count(facts.num_parameters)} parameters"] if facts.num_parameters else []
    parts += [text(facts.device)] if facts.device else []
    parts += [plural(facts.num_sites, "site"), size(facts.nbytes), f"started {report.created}"]
    return ", ".join(parts)


def _ending(report: Report) -> Iterator[str]:
    """Say what ended a training that did not finish, and show the end of its traceback."""
    ending = report.ending
    if ending is None:
        return
    yield "## How it ended"
    yield ""
    trace = traceback_end(ending)
    yield f"{text(ending_words(ending))} {TRACEBACK_IS if trace else ''}".rstrip()
    yield ""
    if trace:
        yield from _code(trace)


def _code(lines: str) -> Iterator[str]:
    # Indented, not fenced: no line of a value can end it.
    yield from (f"    {line}" for line in lines.splitlines())
    yield ""


def _finding(finding: Finding) -> Iterator[str]:
    yield f"### {text(words_of(finding.kind))} ({finding.severity})"
    yield ""
    where = f" in {', '.join(text(site) for site in finding.sites)}" if finding.sites else ""
    yield f"Seen {where_and_when(finding)}{where}, confidence {finding.confidence:.0%}."
    yield ""
    for label, words in (("Cause", finding.cause), ("Fix", finding.fix), ("To prove it wrong", finding.refute)):
        if words:
            yield f"- **{label}:** {text(words)}"
    for item in finding.evidence:
        yield f"- {text(evidence_line(item.name, item.value, item.relation, item.threshold))}"
    if finding.explains:
        yield f"- Explains: {', '.join(text(words_of(kind)) for kind in finding.explains)}"
    yield ""


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(headings) + " |"
    yield "|" + "---|" * len(headings)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


def _metrics(report: Report) -> Iterator[str]:
    if not report.metrics:
        return
    yield "## Metrics"
    yield ""
    rows = [
        [text(metric.name), *(short(value) for value in (metric.trend.first, metric.trend.last)),
         short(metric.trend.lowest), short(metric.trend.highest), metric.trend.direction]
        for metric in report.metrics
    ]  # fmt: skip
    yield from _table(("metric", "first", "last", "lowest", "highest", "now"), rows)


def _layers(report: Report) -> Iterator[str]:
    if not report.layers:
        return
    yield "## Layers, worst first"
    yield ""
    rows = [
        [text(layer.name or "(model)"), text(layer.kind), short(layer.now("gradient")), short(layer.now("update")),
         short(layer.now("output")), text(layer.mark.reason)]
        for layer in report.layers[:MOST_LAYERS]
    ]  # fmt: skip
    yield from _table(("layer", "kind", "gradient rms", "update / weight", "output rms", "stands out"), rows)


def _phases(report: Report) -> Iterator[str]:
    if not report.phases:
        return
    whole = sum(phase.seconds for phase in report.phases)
    yield "## Time of a step"
    yield ""
    rows = [
        [text(phase.name), f"{phase.seconds * 1e3:.3g} ms", f"{phase.seconds / whole:.0%}"] for phase in report.phases
    ]
    yield from _table(("part", "mean", "share"), rows)


def _events(report: Report) -> Iterator[str]:
    if not report.events:
        return
    yield "## Events"
    yield ""
    rows = [["" if event.step is None else f"{event.step:,}", text(event.event_type), text(event.message)]
            for event in report.events[-MOST_EVENTS:]]  # fmt: skip
    yield from _table(("step", "event", ""), rows)


def _details(report: Report) -> Iterator[str]:
    for problem in report.problems:
        yield f"- could not be read: {text(problem)}"
    for title, values in (("Environment", report.environment), ("Config", report.config)):
        if values:
            yield f"## {title}"
            yield ""
            yield from _code(json.dumps(plain(values), indent=1, ensure_ascii=True))
