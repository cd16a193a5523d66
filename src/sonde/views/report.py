"""The report of a run: one document, for people (HTML, Markdown, terminal) and for programs (JSON).

import sonde
from sonde.views.report import render_report

text = render_report(sonde.open_run("runs/first"), "md")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from sonde.analysis import Ending, FlowRow, LayerSummary, Level, RunFacts, Trend, Verdict, describe, thin
from sonde.core import signals
from sonde.core.short_names import short_names
from sonde.errors import OptionError
from sonde.records import Event, Finding, Quantity
from sonde.store import Run, Series, open_run
from sonde.views.document import (
    Block,
    Cell,
    Code,
    Curves,
    Document,
    Figures,
    Findings,
    Folded,
    Section,
    Table,
    Text,
    Tiles,
    Tone,
    Values,
    count_findings,
    ranked,
)
from sonde.views.terminal.style import count, duration, plural, printable, short, size
from sonde.views.terminal.summary import Page, read_page
from sonde.views.terminal.tables import now

if TYPE_CHECKING:
    from sonde.views.figures.theme import Figure

Format = Literal["html", "md", "json", "text"]
FORMATS: Final[tuple[Format, ...]] = ("html", "md", "json", "text")
VERSION: Final = 1
MOST_LAYERS: Final = 25
MOST_EVENTS: Final = 200
_SHORT_LIST: Final = 20
_TRACEBACK_LINES: Final = 20
_MOST_METRICS: Final = 60
_MOST_CURVES: Final = 12
_CURVE_POINTS: Final = 300
_MOST_ODD_LAYERS: Final = 8
_MOST_CHARACTERS: Final = 60_000
_TRACEBACK_IS: Final = "The traceback is in the run's events.jsonl."
_SETTINGS: Final = ("optimizer", "scheduler", "process.", "system.")
_QUANTITIES: Final[tuple[Quantity, ...]] = ("parameter", "gradient", "update", "output")
_TONES: Final[dict[Level, Tone]] = {"bad": "bad", "odd": "odd", "fine": "quiet"}

_VERDICT_TONES: Final[dict[str, Tone]] = {"bad": "bad", "odd": "odd", "fine": "plain", "unknown": "quiet"}

__all__ = ["FORMATS", "Format", "Report", "brief_document", "read_report", "render_report", "report_document"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A scalar that was logged, and how it developed."""

    name: str
    trend: Trend


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """A part of the step and the mean of its seconds."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """Everything in a report, as plain values."""

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
    verdict: Verdict | None = None


def render_report(run: Run | str | Path, form: Format = "html") -> str:
    """Return the report of a run, or of the one at a path, as `html`, `md`, `json` or `text`. Only HTML needs plotly.

    Raises:
        OptionError: There is no such format.
        MissingExtra: HTML was requested, and plotly is not installed.

    """
    run = run if isinstance(run, Run) else open_run(run)
    document = report_document(run)
    writers: dict[str, Callable[[], str]] = {
        "html": document.to_html,
        "md": document.to_markdown,
        "json": document.to_json,
        "text": document.to_text,
    }
    if form not in writers:
        raise OptionError(f"There is no report format {form!r}. There are: {', '.join(FORMATS)}.")
    return writers[form]()


def read_report(run: Run) -> Report:
    """Read everything that a report shows."""
    page: Page = read_page(run)
    return Report(
        facts=page.facts,
        created=_time(run.header.created),
        ending=page.ending,
        findings=ranked(run.findings),
        metrics=_read_metrics(run),
        layers=page.layers,
        flow=page.flow,
        phases=_read_phases(run),
        events=page.events,
        problems=run.problems,
        environment=run.header.environment,
        config=run.header.config,
        verdict=page.verdict,
    )


def report_document(run: Run) -> Document:
    """Return the report of a run as a document: what is wrong first, then figures, then details."""
    report = read_report(run)
    return Document(report.facts.name, list(_sections(run, report)), list(_lead(report)), _data(report))


def brief_document(run: Run) -> Document:
    """Return what matters most about a run: facts, findings, curves of its scalars, the layers that stand out.

    It has no Plotly figures, so it is small and quick to draw: a notebook draws it again and again while a run trains.
    """
    report = read_report(run)
    shown = report.metrics[:_MOST_CURVES]
    curves = {metric.name: _thinned(run, metric.name) for metric in shown}
    odd = replace(report, layers=[layer for layer in report.layers if layer.mark.level != "fine"][:_MOST_ODD_LAYERS])
    sections = [
        Section("How it ended", list(_ending(report.ending))),
        Section("Findings", [Findings(report.findings)] if report.findings else []),
        Section("Metrics", [Curves(curves)] if curves else []),
        Section("Layers that stand out", list(_layers(odd)) if odd.layers else []),
    ]
    return Document(report.facts.name, sections, list(_lead(report)), _data(report))


def _thinned(run: Run, name: str) -> list[float]:
    series = run.series(f"{name}:scalar", "value")
    return [float(value) for value in thin(series.steps, series.values, _CURVE_POINTS)[1]]


# ---------------------------------------------------------------------- reading


def _time(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return "at an unknown time"


def _read_metrics(run: Run) -> list[Metric]:
    sites = [site for site in run.sites if site.quantity == "scalar" and not site.name.startswith(_SETTINGS)]
    found = []
    for site in sites:
        series = run.series(site, "value")
        if len(series.steps):
            found.append(Metric(site.key.replace(":scalar", ""), describe(series.steps, series.values)))
    return found


def _read_phases(run: Run) -> list[PhaseTime]:
    known = {site.key: site for site in run.sites if site.quantity == "vital"}
    names = {signals.DATA_WAIT: "waiting for data"} | {signals.time_of(name): name for name in signals.PHASE_TIMES}
    seconds: dict[str, Series] = {}
    for part, name in names.items():
        site = known.get(f"{signals.LOOP}:vital{signals.part_of(part)}")
        if site is not None:
            series = run.series(site, "mean")
            if np.isfinite(series.values).any():
                seconds[name] = series
    # A part that did not occur in a step took no time in it.
    steps = np.unique(np.concatenate([series.steps for series in seconds.values()])) if seconds else ()
    return [PhaseTime(name, float(np.nansum(series.values)) / len(steps)) for name, series in seconds.items()]


# ---------------------------------------------------------------------- the document


def _lead(report: Report) -> Iterator[Block]:
    facts = report.facts
    length = f" in {duration(facts.seconds)}" if facts.seconds is not None else ""
    about = [
        facts.describe_steps() + length,
        facts.model,
        facts.device,
        plural(facts.num_sites, "site"),
        size(facts.nbytes),
        f"started {report.created}",
    ]
    yield Text(" · ".join(part for part in about if part), "quiet")
    if report.verdict is not None and facts.num_steps:
        yield Text(report.verdict.text, _VERDICT_TONES[report.verdict.tone])
    for problem in report.problems:
        yield Text(f"could not be read: {problem}", "bad")
    tiles = [
        ("status", facts.status),
        ("steps per second", short(facts.steps_per_second) if facts.steps_per_second else ""),
        ("parameters", count(facts.num_parameters) if facts.num_parameters else ""),
        ("found", count_findings(report.findings)),
        *_loss_tiles(report),
    ]
    yield Tiles([(name, value) for name, value in tiles if value])


def _loss_tiles(report: Report) -> list[tuple[str, str]]:
    losses = [metric for metric in report.metrics if "loss" in metric.name.lower()]
    if not losses:
        return []
    return [("last loss", short(losses[0].trend.last)), ("loss is", _going(report, losses[0].name, losses[0].trend))]


def _going(report: Report, name: str, trend: Trend) -> str:
    """Return where a metric is going, in the words of the verdict where that tells."""
    told = {} if report.verdict is None else {metric.name: metric.going for metric in report.verdict.metrics}
    return told.get(name) or ("no longer finite" if trend.direction == "broken" else trend.direction)


def _sections(run: Run, report: Report) -> Iterator[Section]:
    yield Section("How it ended", list(_ending(report.ending)))
    none = Text("No finding was recorded in this run.", "quiet")
    yield Section("Findings", [Findings(report.findings) if report.findings else none])
    yield Section("Metrics", [*_metrics(report), _figures("training_metrics", run)])
    yield Section("Gradients", [Figures(lambda: _gradients(run))])
    yield Section("Layers, worst first", list(_layers(report)))
    looks = _look_closer(report)
    yield Section("Closer looks", [Figures(lambda: _histograms(run, looks), min(2, len(looks)))] if looks else [])
    if any(site.quantity == "output" for site in run.sites):
        yield Section("Activations", [_figures("activation_patterns", run)])
    yield Section("Model", [_figures("model_tree", run)])
    yield Section("Time of a step", [*_phases(report), _figures("step_phases", run)])
    yield Section("Memory", [_figures("memory_timeline", run)])
    yield Section("Events", [*_events(report), _figures("event_timeline", run)])
    yield Section("Environment", [Values(report.environment)] if report.environment else [])
    yield Section("Config", list(_config(report.config)))


def _figures(name: str, run: Run) -> Figures:
    def draw() -> list[Figure]:
        from sonde.views import figures

        return [getattr(figures, name)(run)]

    return Figures(draw)


def _gradients(run: Run) -> list[Figure]:
    from sonde.views import figures

    has = {site.quantity for site in run.sites}
    drawn = [figures.gradient_flow(run), figures.gradient_flow_over_time(run)]
    if "gradient" in has:
        drawn.append(figures.layer_heatmap(run, "*:gradient"))
    return [*drawn, figures.update_ratio(run)] if "update" in has else drawn


def _look_closer(report: Report) -> list[str]:
    """Return the gradients of the layers that stand out most, or else of the first layer."""
    chosen = [layer for layer in report.layers if layer.mark.level != "fine"] or report.layers[:1]
    return [layer.sites["gradient"].site.key for layer in chosen if "gradient" in layer.sites][:4]


def _histograms(run: Run, keys: Sequence[str]) -> list[Figure]:
    from sonde.views import figures

    return [figures.histogram_over_time(run, run.site(key)) for key in keys]


def _ending(ending: Ending | None) -> Iterator[Block]:
    if ending is None:
        return
    trace = _traceback_end(ending)
    text = ending_words(ending) + (f" {_TRACEBACK_IS}" if trace else "")
    yield Text(text, "quiet" if ending.by_hand else "bad")
    if trace:
        yield Folded("traceback", [Code(trace)])


def ending_words(ending: Ending) -> str:
    """Return how a training ended that did not finish, and at which step.

    >>> ending_words(Ending("The training was interrupted.", 40, by_hand=True))
    'At step 40: The training was interrupted.'
    """
    words = ending.text if ending.text.endswith(".") else f"{ending.text}."
    return words if ending.step is None else f"At step {ending.step:,}: {words}"


def _traceback_end(ending: Ending) -> str:
    """Return the last lines of the traceback, without what cannot be printed; nothing if the training was stopped."""
    trace = "" if ending.by_hand else ending.traceback or ""
    return "\n".join(map(printable, trace.splitlines()[-_TRACEBACK_LINES:]))


def _metrics(report: Report) -> Iterator[Block]:
    rows = [
        [name, *map(short, (trend.first, trend.last, trend.lowest, trend.highest)), _going(report, name, trend)]
        for metric in report.metrics[:_MOST_METRICS]
        for name, trend in [(metric.name, metric.trend)]
    ]
    if rows:
        yield Table(["metric", "first", "last", "lowest", "highest", "going"], rows, (1, 2, 3, 4))


def _layers(report: Report) -> Iterator[Block]:
    if not report.layers:
        yield Text("No layer was recorded.", "quiet")
        return
    shown = report.layers[:MOST_LAYERS]
    names = short_names([layer.name for layer in shown]).names
    rows: list[list[str | Cell]] = [
        [
            Cell(name, hint=layer.name),
            layer.kind,
            *(short(now(layer, quantity)) for quantity in _QUANTITIES),
            Cell(layer.mark.reason, _TONES[layer.mark.level], layer.worst.site.key),
        ]
        for layer, name in zip(shown, names, strict=True)
    ]
    headings = ["layer", "kind", "weight RMS", "gradient RMS", "update / weight", "output RMS", "why it stands out"]
    yield Table(headings, rows, (2, 3, 4, 5))
    if len(report.layers) > len(rows):
        yield Text(f"and {len(report.layers) - len(rows):,} more layers", "quiet")


def _phases(report: Report) -> Iterator[Block]:
    whole = sum(phase.seconds for phase in report.phases)
    rows = [[each.name, f"{each.seconds * 1e3:.3g} ms", f"{each.seconds / whole:.0%}"] for each in report.phases]
    if rows:
        yield Table(["part", "mean", "share"], rows, (1, 2))


def _events(report: Report) -> Iterator[Block]:
    shown = report.events[-MOST_EVENTS:][::-1]
    rows = [["" if each.step is None else f"{each.step:,}", each.event_type, each.message] for each in shown]
    if rows:
        table = Table(["step", "event", "message"], rows, (0,), most=_SHORT_LIST)
        yield Folded(f"{plural(len(rows), 'event')}, latest first", [table], is_open=len(rows) <= 12)


def _config(config: dict[str, Any]) -> Iterator[Block]:
    if config:
        text = Values(config).as_json(ascii_only=True)
        cut = "\n... cut here; run.json has all of it" if len(text) > _MOST_CHARACTERS else ""
        yield Folded("the config as JSON", [Code(text[:_MOST_CHARACTERS] + cut)])


# ---------------------------------------------------------------------- JSON


def _data(report: Report) -> dict[str, Any]:
    return {
        "report_version": VERSION,
        "run": report.facts,
        "verdict": None if report.verdict is None else report.verdict.text,
        "ending": report.ending,
        "findings": [finding.to_json() for finding in report.findings],
        "metrics": [{"name": metric.name, **asdict(metric.trend)} for metric in report.metrics],
        "layers": [_layer_data(layer) for layer in report.layers],
        "gradient_flow": [
            {"layer": row.name, "gradient": row.gradient, "update_ratio": row.ratio} for row in report.flow
        ],
        "phases": report.phases,
        "events": report.events,
        "problems": report.problems,
        "environment": report.environment,
        "config": report.config,
    }


def _layer_data(layer: LayerSummary) -> dict[str, Any]:
    mark = layer.mark
    return {
        "layer": layer.name,
        "kind": layer.kind,
        "level": mark.level,
        "reason": mark.reason,
        "since_step": mark.step,
        "site": layer.worst.site.key,
        "values": {quantity: {"statistic": row.stat, "now": row.now} for quantity, row in layer.sites.items()},
    }
