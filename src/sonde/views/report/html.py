"""A report as one HTML file that opens from disk: what is wrong first, then the pictures, then the details."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Final

from sonde.analysis import Level, Mark
from sonde.records import Finding, Quantity
from sonde.store import Run
from sonde.views import figures
from sonde.views.figures.library import Figure
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

MOST_LAYERS: Final = 25
MOST_EVENTS: Final = 200
_MOST_SIGNS: Final = 60_000
_MOST_ROWS: Final = 60
_QUANTITIES: Final[tuple[Quantity, ...]] = ("parameter", "gradient", "update", "output")


def to_html(run: Run, report: Report) -> str:
    """Write a report."""
    looks = _looks(run, report)
    parts = [
        figures.Part("Findings", html=_findings(report), anchor="findings"),
        _pictured("Metrics", "metrics", [figures.training_metrics(run)], _metrics(report)),
        _pictured("Gradients", "gradients", _gradients(run)),
        figures.Part("Layers, worst first", html=_layers(report), anchor="layers"),
        _pictured("Closer looks", "looks", looks, columns=min(2, len(looks))),
        _pictured("Activations", "activations", _activations(run)),
        _pictured("Model", "model", [figures.model_tree(run)]),
        _pictured("Time of a step", "time", [figures.step_phases(run)], _phases(report)),
        _pictured("Memory", "memory", [figures.memory_timeline(run)]),
        _pictured("Events", "events", [figures.event_timeline(run)], _events(report)),
        figures.Part("Environment", html=_pairs(report.environment), anchor="environment"),
        figures.Part("Config", html=_tree(report.config), anchor="config"),
    ]
    shown = [part for part in parts if part.figures or part.html]
    return figures.page(f"{report.facts.name}", shown, lead=_lead(report))


def _pictured(title: str, anchor: str, drawn: Sequence[Figure], html: str = "", *, columns: int = 1) -> figures.Part:
    """Return a section; a figure that has nothing to draw becomes a sentence that says what is missing."""
    full = [figure for figure in drawn if figure.data]
    missing = [figure.layout.annotations[0].text for figure in drawn if not figure.data]
    # What an empty figure says is escaped already.
    said = "".join(f'<p class="quiet">{words}</p>' for words in missing) if not html else ""
    return figures.Part(title, full, html + said, anchor, columns)


def _gradients(run: Run) -> list[Figure]:
    has = {site.quantity for site in run.sites}
    drawn = [figures.gradient_flow(run), figures.gradient_flow_over_time(run)]
    if "gradient" in has:
        drawn.append(figures.layer_heatmap(run, "*:gradient"))
    return [*drawn, figures.update_ratio(run)] if "update" in has else drawn


def _activations(run: Run) -> list[Figure]:
    return [figures.activation_patterns(run)] if any(site.quantity == "output" for site in run.sites) else []


def _looks(run: Run, report: Report) -> list[Figure]:
    """Draw how the magnitudes moved in the layers that stand out most, or else in the first layer."""
    chosen = [layer for layer in report.layers if layer.mark.level != "fine"] or report.layers[:1]
    sites = [layer.sites["gradient"].site for layer in chosen if "gradient" in layer.sites][:4]
    return [figures.histogram_over_time(run, site) for site in sites]


def _lead(report: Report) -> str:
    facts = report.facts
    tiles = [
        ("status", facts.status),
        ("steps", f"{facts.num_steps:,}"),
        ("time", duration(facts.seconds) if facts.seconds is not None else None),
        ("steps per second", short(facts.steps_per_second) if facts.steps_per_second else None),
        ("parameters", count(facts.num_parameters) if facts.num_parameters else None),
        ("findings", f"{len(report.findings):,}"),
        *_loss_tiles(report),
    ]
    drawn = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in tiles if value
    )
    about = [
        facts.model,
        facts.device,
        plural(facts.num_sites, "site"),
        size(facts.nbytes),
        f"started {report.created}",
    ]
    line = f'<p class="quiet">{escape(" · ".join(part for part in about if part))}</p>'
    bad = "".join(f'<p class="bad">could not be read: {escape(problem)}</p>' for problem in report.problems)
    return f'{line}{_ending(report)}{bad}<div class="tiles">{drawn}</div>'


def _ending(report: Report) -> str:
    ending = report.ending
    if ending is None:
        return ""
    words = f'<p class="{"quiet" if ending.by_hand else "bad"}">{escape(ending_words(ending))}</p>'
    trace = traceback_end(ending)
    shown = f"<p class=quiet>{escape(TRACEBACK_IS)}</p><pre>{escape(trace)}</pre>"
    return f"{words}<details><summary>its traceback</summary>{shown}</details>" if trace else words


def _loss_tiles(report: Report) -> list[tuple[str, str]]:
    losses = [metric for metric in report.metrics if "loss" in metric.name.lower()]
    return [("last loss", short(losses[0].trend.last)), ("loss is", losses[0].trend.direction)] if losses else []


def _findings(report: Report) -> str:
    if not report.findings:
        return '<p class="quiet">No finding was recorded in this run.</p>'
    return "".join(_finding(finding) for finding in report.findings)


def _finding(finding: Finding) -> str:
    evidence = "".join(
        f"<li>{escape(evidence_line(e.name, e.value, e.relation, e.threshold))}</li>" for e in finding.evidence
    )
    rows = [
        ("where", escape(", ".join(finding.sites))),
        ("cause", escape(finding.cause)),
        ("fix", escape(finding.fix)),
        ("evidence", f"<ul>{evidence}</ul>" if evidence else ""),
        ("to prove it wrong", escape(finding.refute)),
        ("explains", escape(", ".join(words_of(kind) for kind in finding.explains))),
    ]
    listed = "".join(f"<dt>{name}</dt><dd>{html}</dd>" for name, html in rows if html)
    when = f"{where_and_when(finding)}, confidence {finding.confidence:.0%}"
    return (
        f'<article class="finding {escape(finding.severity)}"><span class="severity">{escape(finding.severity)}</span>'
        f'<h3>{escape(words_of(finding.kind))}</h3><span class="quiet">{escape(when)}</span><dl>{listed}</dl></article>'
    )


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Return a table of cells that are HTML already; `numbers` are the columns to set flush right."""
    cells = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    head = f"<thead><tr>{cells}</tr></thead>" if headings else ""
    body = "".join(
        "<tr>"
        + "".join(f"<td{' class=number' if i in numbers else ''}>{cell}</td>" for i, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def _metrics(report: Report) -> str:
    rows = [
        (escape(metric.name), *map(short, (metric.trend.first, metric.trend.last, metric.trend.lowest)),
         short(metric.trend.highest), escape(metric.trend.direction))
        for metric in report.metrics[:_MOST_ROWS]
    ]  # fmt: skip
    headings = ("metric", "first", "last", "lowest", "highest", "lately")
    return table(headings, rows, (1, 2, 3, 4)) if rows else ""


def _layers(report: Report) -> str:
    rows = [
        (
            escape(layer.name or "(model)"),
            escape(layer.kind),
            *(short(layer.now(quantity)) for quantity in _QUANTITIES),
            _mark(layer.mark, layer.worst.site.key),
        )
        for layer in report.layers[:MOST_LAYERS]
    ]
    if not rows:
        return '<p class="quiet">No layer was recorded.</p>'
    rest = len(report.layers) - len(rows)
    more = f'<p class="quiet">and {rest:,} more layers</p>' if rest > 0 else ""
    headings = ("layer", "kind", "weight rms", "gradient rms", "update / weight", "output rms", "stands out")
    return table(headings, rows, (2, 3, 4, 5)) + more


_CLASSES: Final[dict[Level, str]] = {"bad": "bad", "odd": "odd", "fine": "quiet"}


def _mark(mark: Mark, key: str) -> str:
    return (
        f'<span class="{_CLASSES[mark.level]}" title="{escape(key)}">{escape(mark.reason)}</span>'
        if mark.reason
        else ""
    )


def _phases(report: Report) -> str:
    whole = sum(phase.seconds for phase in report.phases)
    rows = [
        (escape(each.name), f"{each.seconds * 1e3:.3g} ms", f"{each.seconds / whole:.0%}") for each in report.phases
    ]
    return table(("part", "mean", "share"), rows, (1, 2)) if rows else ""


def _events(report: Report) -> str:
    shown = report.events[-MOST_EVENTS:]
    rows = [("" if e.step is None else f"{e.step:,}", escape(e.event_type), escape(e.message)) for e in shown]
    if not rows:
        return ""
    listed = table(("step", "event", "message"), rows, (0,))
    state = " open" if len(rows) <= 12 else ""
    return f"<details{state}><summary>{plural(len(rows), 'event')}</summary>{listed}</details>"


def _pairs(values: dict[str, Any]) -> str:
    rows = [(escape(str(name)), f"<code>{escape(_line(value))}</code>") for name, value in values.items()]
    return table((), rows) if rows else ""


def _line(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False)


def _tree(values: dict[str, Any]) -> str:
    if not values:
        return ""
    text = json.dumps(plain(values), indent=2, ensure_ascii=False)
    cut = "\n… cut here; run.json has all of it" if len(text) > _MOST_SIGNS else ""
    return f"<details><summary>the config as JSON</summary><pre>{escape(text[:_MOST_SIGNS] + cut)}</pre></details>"
