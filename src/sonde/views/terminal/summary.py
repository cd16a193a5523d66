"""The page about a run: how it went, which layers to look at, how gradients flow, and what to try next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from sonde.analysis import (
    ENDING_EVENTS,
    Ending,
    FlowRow,
    LayerSummary,
    ModelOrder,
    RunFacts,
    SiteSummary,
    Verdict,
    any_in_columns,
    column_edges,
    columns,
    describe,
    ending_of,
    events_of,
    facts_of,
    find_loss,
    gradient_flow,
    loss_title,
    smooth,
    summarise_layers,
    summarise_sites,
    thin,
    verdict_on,
    worst_first,
)
from sonde.records import Event, Finding
from sonde.store import Run
from sonde.views.terminal.events import event_table
from sonde.views.terminal.findings import ending_line, finding_lines
from sonde.views.terminal.heatmap import HeatMap, heat_map
from sonde.views.terminal.plot import MOST_POWER, Curve, PlotOptions, line_plot
from sonde.views.terminal.style import (
    BAD,
    CURVE,
    GOOD,
    LEVEL_STYLES,
    ODD,
    QUIET,
    RAW_CURVE,
    STATUS_STYLES,
    TITLE,
    Look,
    count,
    duration,
    plural,
    printable,
    short,
    size,
)
from sonde.views.terminal.tables import WIDE, flow_bars, layer_table, section_title

MOST_LAYERS = 10
_MOST_MARKS = 20
# A loss that spans more than this is drawn in decades, or its end is a flat line.
_LOG_LOSS_SPAN = 30.0

# A weight decay of zero is a choice, and so are labels: next to tensors they are not worth a closer look.
_SETTINGS = ("scalar", "input")

_Part = Callable[["Page", Look], Group]


@dataclass(frozen=True, slots=True, eq=False)
class Page:
    """What the page shows, read from a run once."""

    facts: RunFacts
    span: tuple[int, int]
    loss: SiteSummary | None
    sites: list[SiteSummary]
    layers: list[LayerSummary]
    flow: list[FlowRow]
    events: list[Event]
    findings: list[Finding] = field(default_factory=list)
    ending: Ending | None = None
    verdict: Verdict | None = None


def read_page(run: Run, *, last: int | None = None) -> Page:
    """Read all that the page shows."""
    order = ModelOrder(run.header, run.sites)
    shown = [site for site in run.sites if site.same_as is None and site.quantity != "vital"]
    sites = worst_first(summarise_sites(run, shown, last=last), order)
    # The sites together may be too much to read in full; the loss alone never is.
    loss = [site for site in (find_loss(run.sites),) if site is not None]
    return Page(
        facts=facts_of(run),
        span=_span(sites),
        loss=next(iter(summarise_sites(run, loss, last=last)), None),
        sites=sites,
        layers=summarise_layers(sites, order),
        flow=gradient_flow(sites, order),
        # Routine events are left out: epochs are in the curve's axis, where the loss comes from is in its title.
        events=[event for event in events_of(run) if event.event_type not in ("epoch", "loss_seen", "tape", "program")],
        findings=[finding for finding in run.findings if finding.severity != "info"],
        ending=ending_of(run),
        verdict=verdict_on(run),
    )


def _span(sites: Sequence[SiteSummary]) -> tuple[int, int]:
    firsts = [int(row.steps[0]) for row in sites if len(row.steps)]
    lasts = [int(row.steps[-1]) for row in sites if len(row.steps)]
    return (min(firsts), max(lasts)) if firsts else (0, 0)


def print_summary(run: Run, console: Console, *, last: int | None = None) -> None:
    """Print the page about a run."""
    look = Look.of(console)
    page = read_page(run, last=last)
    for part in render(page, look):
        console.print(part)
    if page.facts.num_steps:
        console.print(section_title("try next", look))
        for line in next_lines(page, look):
            # A command is copied whole: the terminal may wrap it, we must not.
            console.print(line, soft_wrap=True)


def render(page: Page, look: Look) -> Iterator[RenderableType]:
    """Return the parts of the page about the run, top to bottom."""
    yield run_header(page.facts, look)
    if page.verdict is not None and page.facts.num_steps:
        yield verdict_line(page.verdict)
    elif page.ending is not None:
        yield ending_line(page.ending, look)
    if page.findings:
        yield finding_lines(page.findings, look)
    if not page.facts.num_steps:
        yield Text(f"\n{_no_steps(page.facts)}", QUIET)
        return
    if look.width >= WIDE and page.flow:
        yield _side_by_side(loss_part, over_time_part, page, look)
    else:
        yield loss_part(page, look)
    if page.layers:
        yield layers_part(page, look)
    if any(np.isfinite(row.gradient) for row in page.flow):
        yield section_title("gradient flow, first layer to last", look)
        yield flow_bars(page.flow, look)
    # How a run ended is shown first, and once.
    events = [event for event in page.events if page.ending is None or event.event_type not in ENDING_EVENTS]
    if events:
        yield section_title("events", look)
        yield event_table(events)


def verdict_line(verdict: Verdict) -> Text:
    """Return the verdict on a run, its first words in the colour of what they mean."""
    style = {"bad": BAD, "odd": ODD, "fine": GOOD, "unknown": QUIET}[verdict.tone]
    text = printable(verdict.text)
    return Text.assemble((text[: len(verdict.headline)], style), text[len(verdict.headline) :])


def _no_steps(facts: RunFacts) -> str:
    if facts.status == "live":
        return "No steps have been recorded yet."
    return "No steps were recorded: optimizer.step() ends one, or session.step() where there is no optimizer."


def run_header(facts: RunFacts, look: Look) -> Group:
    """Return what a run is and how far it is, in a few lines."""
    dot = look.pick(" · ", " | ")
    status = Text(facts.status, STATUS_STYLES.get(facts.status, ""))
    first = Text.assemble((facts.name, TITLE), dot, status, dot, _progress(facts))
    second = [f"{facts.model}" if facts.model else ""]
    second.append(f"{count(facts.num_parameters)} parameters" if facts.num_parameters else "")
    second.append(facts.device)
    second.append(plural(facts.num_sites, "site"))
    second.append(plural(facts.num_ranks, "rank") if facts.num_ranks > 1 else "")
    second.append(plural(facts.num_attempts, "attempt") if facts.num_attempts > 1 else "")
    second.append(size(facts.nbytes))
    lines = [first, Text(dot.join(part for part in second if part), QUIET)]
    if facts.cost:
        lines.append(Text(facts.cost, QUIET))
    if facts.dropped:
        lines.append(Text(f"{plural(facts.dropped, 'step')} dropped while recording: the disk did not keep up", ODD))
    if facts.num_problems:
        lines.append(Text(f"{plural(facts.num_problems, 'part')} of it could not be read: sonde verify", BAD))
    return Group(*lines)


def _progress(facts: RunFacts) -> str:
    if facts.seconds is None or facts.steps_per_second is None:
        return facts.describe_steps()
    rate = f"{short(facts.steps_per_second)} steps/s"
    return f"{facts.describe_steps()} in {duration(facts.seconds)} ({rate})"


def _side_by_side(left: _Part, right: _Part, page: Page, look: Look) -> Table:
    half = (look.width - 3) // 2
    grid = Table.grid(padding=(0, 3, 0, 0), pad_edge=False)
    grid.add_column(width=half)
    grid.add_column(width=half)
    grid.add_row(left(page, replace(look, width=half)), right(page, replace(look, width=half)))
    return grid


def loss_part(page: Page, look: Look) -> Group:
    """Return the curve of the loss."""
    loss = page.loss
    name = "loss" if loss is None else loss_title(loss.site)
    name = name if name.startswith("loss") else f"loss: {name}"
    title = section_title(name, look)
    if loss is None or not len(loss.values):
        hint = Text("No loss was logged; session.log(loss=loss) adds this curve.", QUIET)
        return Group(title, hint)
    if not np.isfinite(loss.values).any():
        what = "NaN" if np.isnan(loss.values).all() else "not finite"
        never = Text(f"{what} in all of its {plural(len(loss.values), 'reading')}", BAD)
        return Group(title, never)
    steps, values = thin(loss.steps, loss.values, 4 * look.width)
    trend = describe(loss.steps, loss.values)
    log = trend.lowest > 0 and trend.highest / trend.lowest > _LOG_LOSS_SPAN
    # In decades a straight line is an exponential decay, so smoothing is done there too.
    shaped = np.log10(values, out=np.full(len(values), np.nan), where=values > 0) if log else values
    smoothed = smooth(shaped, max(2, len(values) // 25))
    curves = [
        Curve(steps, values, style=RAW_CURVE),
        Curve(steps, 10 ** np.minimum(smoothed, MOST_POWER) if log else smoothed, style=CURVE),
    ]
    plot = line_plot(curves, look, PlotOptions(height=9, log=log, marks=_bad_steps(page)))
    return Group(title, _loss_words(page, look), plot)


def _bad_steps(page: Page) -> list[int]:
    found = {row.mark.step for row in page.sites if row.mark.level == "bad" and row.mark.step is not None}
    return sorted(found)[:_MOST_MARKS]


def _loss_words(page: Page, look: Look) -> Text:
    assert page.loss is not None
    trend = describe(page.loss.steps, page.loss.values)
    arrow = look.pick(" → ", " > ")
    last = (short(trend.last), TITLE if math.isfinite(trend.last) else BAD)
    text = Text.assemble(short(trend.first), arrow, last)
    text.append(f"   best {short(trend.lowest)} at {trend.lowest_step}", QUIET)
    text.append("   ")
    text.append(*_going(page))
    if marks := _bad_steps(page):
        text.append(f"   {look.pick('▲', '^')} {marks[0]}", BAD)
    return text


def _going(page: Page) -> tuple[str, str]:
    """Return where the loss is going, in the words of the verdict."""
    metrics = page.verdict.metrics if page.verdict is not None and page.loss is not None else ()
    for metric in metrics:
        if page.loss is not None and metric.name == page.loss.site.name:
            style = BAD if metric.changes == "worse" or not math.isfinite(metric.last) else QUIET
            return metric.going, GOOD if metric.changes == "better" else style
    return "", QUIET


def over_time_part(page: Page, look: Look) -> Group:
    """Return the gradients of all layers over the steps, as colours."""
    names = [row.name for row in page.flow]
    by_layer = {layer.name: layer for layer in page.layers}
    rows = [by_layer[name].sites["gradient"] for name in names if "gradient" in by_layer[name].sites]
    gutter = min(max(map(len, names)), look.width // 3)
    edges = column_edges(*page.span, look.width - gutter - 1)
    data = HeatMap(
        values=np.stack([columns(row.steps, row.values, edges) for row in rows]),
        names=look.fit_names(names, gutter),
        left=f"step {page.span[0]:,}",
        right=f"{page.span[1]:,}",
        bad=np.stack([any_in_columns(row.steps, row.bad, edges) for row in rows]),
        unit="rms",
        styles=[LEVEL_STYLES[row.mark.level] for row in page.flow],
    )
    return Group(section_title("gradients over time", look), heat_map(data, look))


def layers_part(page: Page, look: Look) -> Group:
    """Return the table of layers, worst first."""
    # Containers and activations have outputs only; they earn a row when something is wrong with them.
    listed = [
        layer for layer in page.layers if layer.mark.level != "fine" or "parameter" in layer.sites or _moves(layer)
    ]
    listed = listed or page.layers
    shown = listed[:MOST_LAYERS]
    first = page.facts.first_step
    since = f", since step {page.span[0]:,}" if first is not None and page.span[0] > max(first, 1) else ""
    title = section_title(f"layers, worst first{since}", look)
    parts: list[RenderableType] = [title, layer_table(shown, page.span, look)]
    rest = listed[MOST_LAYERS:]
    if rest:
        odd = sum(layer.mark.level != "fine" for layer in rest)
        how = f"{odd} of them stand out too" if odd else "none of them stands out"
        parts.append(Text(f"  and {plural(len(rest), 'layer')} more; {how}", QUIET))
    return Group(*parts)


def _moves(layer: LayerSummary) -> bool:
    return "gradient" in layer.sites or "update" in layer.sites


def next_lines(page: Page, look: Look) -> list[Text]:
    """Return commands worth typing next, with what each is for."""
    path = shlex.quote(page.facts.path)
    worst = next((row for row in page.sites if row.mark.level == "bad" or row.site.quantity not in _SETTINGS), None)
    lines = []
    if page.findings:
        lines.append((f"sonde diagnose {path}", "evidence and fixes"))
    if worst is not None and worst.mark.level != "fine":
        lines.append((f"sonde show {path} --site {shlex.quote(worst.site.key)}", f"{worst.mark.reason}: look closer"))
        if worst.mark.step is not None:
            lines.append((f"sonde show {path} --step {worst.mark.step}", "every site at that step"))
    else:
        lines.append((f"sonde show {path} --site '*:gradient'", "every gradient, worst first"))
    if page.facts.status == "live":
        lines.append((f"sonde tail {path}", "follow it as it trains"))
    lines.append((f"sonde view {path}", "all of it in the browser"))
    lines.append((f"sonde export {path} --to csv --out run.csv", "take the numbers elsewhere"))
    lines.append((f"python: sonde.open_run({page.facts.path!r})", "series, events and tables in Python"))
    return [_command(command, purpose, look) for command, purpose in lines]


def _command(command: str, purpose: str, look: Look) -> Text:
    # What a command is for moves below it where it does not fit beside it.
    beside = len(command) + len(purpose) + 3 <= look.width
    gap = "   " if beside else "\n    "
    return Text.assemble((command, "cyan"), gap, (purpose, QUIET))
