"""Tables of layers, sites and readings, through rich."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from sonde.analysis import FlowRow, LayerSummary, Level, SiteSummary, any_in_columns, column_edges, columns
from sonde.analysis.unusual import RECENT
from sonde.core import schema, statistics
from sonde.core.schema import Bins
from sonde.records import Quantity, Reading, Site
from sonde.store import Run
from sonde.views.terminal.bars import bar, sparkline
from sonde.views.terminal.heatmap import HeatMap, heat_map, histogram_plot, power_of_two, visible_bins
from sonde.views.terminal.plot import Curve, PlotOptions, line_plot, power_of_ten
from sonde.views.terminal.style import (
    ABSENT,
    BAD,
    BAR,
    CROSS,
    GOOD,
    LEVEL_STYLES,
    ODD,
    QUIET,
    TITLE,
    Look,
    count,
    short,
)

# --------------------------------------------------------------------------------


WIDE = 110
NARROW = 72
# Updates of about a thousandth of the weight are usual; a hundred times more or less deserves a look.
_USUAL_RATIO = (1e-5, 1e-1)


def plain_table(*headings: str, right: Sequence[str] = ()) -> Table:
    """Return an empty table without lines: headings, and two spaces between columns."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=QUIET)
    for heading in headings:
        if heading in right:
            table.add_column(heading, justify="right", no_wrap=True)
        else:
            table.add_column(heading, overflow="fold")
    return table


def dot(level: Level, look: Look) -> Text:
    """Return the coloured mark that starts a row."""
    signs = {"bad": look.pick("●", "!"), "odd": look.pick("●", "?"), "fine": look.pick("·", ".")}
    return Text(signs[level], LEVEL_STYLES[level] or QUIET)


def number(value: float, style: str = "", *, broken: bool = False) -> Text:
    """Return a number for a cell. NaN is a quiet dash, for what is not known, unless the reading itself is `broken`."""
    if np.isnan(value) and not broken:
        return Text(ABSENT, QUIET, no_wrap=True)
    return Text(short(value), style if np.isfinite(value) else BAD, no_wrap=True)


def now(layer: LayerSummary, quantity: Quantity) -> float | None:
    """Return the recent value of a quantity of a layer: NaN where it has only been non-finite, None if not recorded."""
    row = layer.sites.get(quantity)
    if row is None or (np.isnan(row.now) and not row.bad[-RECENT:].any()):
        return None
    return row.now


def _cell(layer: LayerSummary, quantity: Quantity) -> Text:
    value = now(layer, quantity)
    return number(np.nan if value is None else value, broken=value is not None)


def ratio(value: float) -> Text:
    """Return an update ratio, coloured where it is far from usual."""
    usual = _USUAL_RATIO[0] <= value <= _USUAL_RATIO[1]
    return number(value, "" if np.isnan(value) else (GOOD if usual else ODD))


def spark_of(row: SiteSummary, span: tuple[int, int], width: int, look: Look) -> Text:
    """Draw a site's values over `span` (first and last step), so that the sparklines of a table line up."""
    edges = column_edges(*span, width)
    log = row.site.quantity != "scalar" and statistics.find(row.stat).log
    bad = any_in_columns(row.steps, row.bad, edges)
    return sparkline(columns(row.steps, row.values, edges), look, bad=bad, log=log)


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the layer table: its heading, how wide a page it needs, and its cell."""

    heading: str
    least_width: int
    cell: Callable[[LayerSummary], Text]


def layer_table(layers: Sequence[LayerSummary], span: tuple[int, int], look: Look) -> Table:
    """Return one row per layer: its gradient with a sparkline, update ratio, and what makes it stand out."""
    roomy = look.width >= WIDE
    spark_width = 24 if roomy else 11
    numbers = [
        _Column("kind", 125, lambda layer: Text(layer.kind, QUIET)),
        _Column("weight", 100, lambda layer: _cell(layer, "parameter")),
        _Column("gradient", 0, lambda layer: _cell(layer, "gradient")),
        _Column("", 0, lambda layer: _gradient_spark(layer, span, spark_width, look)),
        _Column("update/w", 0, lambda layer: ratio(layer.now("update"))),
        _Column("output", 90, lambda layer: _cell(layer, "output")),
    ]
    shown = [column for column in numbers if look.width >= column.least_width]
    remarks = [remark(layer) for layer in layers]
    odd = any(remarks)
    # Where nothing stands out, names get the room of the words about it.
    room = 40 if roomy else 22 if odd else max(22, look.width - 40)
    last = ["stands out"] if odd else []
    table = plain_table("", "layer", *(column.heading for column in shown), *last, right=_NUMERIC)
    names = look.fit_names([layer.name for layer in layers], room)
    for layer, words, shown_name in zip(layers, remarks, names, strict=True):
        name = Text(shown_name, LEVEL_STYLES[layer.mark.level], no_wrap=True)
        cells = [column.cell(layer) for column in shown]
        table.add_row(dot(layer.mark.level, look), name, *cells, *([words] if odd else []))
    return table


_NUMERIC = ("weight", "gradient", "update/w", "output", "last", "min", "max")


def _gradient_spark(layer: LayerSummary, span: tuple[int, int], width: int, look: Look) -> Text:
    row = layer.sites.get("gradient") or layer.sites.get("output")
    return spark_of(row, span, width, look) if row else Text("")


def remark(layer: LayerSummary) -> Text:
    """Return why a layer stands out; names the quantity unless it is the gradient of the weight."""
    mark, site = layer.mark, layer.worst.site
    if not mark.reason:
        return Text("")
    quantity = "" if site.quantity == "gradient" else site.quantity.replace("_", " ") + " "
    is_main = layer.sites[site.quantity].site == site
    leaf = "" if is_main or site.name == layer.name else site.name.rpartition(".")[2] + " "
    return Text(f"{leaf}{quantity}{mark.reason}", LEVEL_STYLES[mark.level])


def site_table(rows: Sequence[SiteSummary], span: tuple[int, int], look: Look) -> Table:
    """Return one row per site: last, smallest and largest value of a statistic, a sparkline, and what stands out."""
    roomy, mixed = look.width >= WIDE, len({row.stat for row in rows}) > 1
    # The heading says of which statistic the numbers are; where they differ, each row does.
    # A narrow page has room for the short name only, which is also what --stat takes.
    label = (lambda stat: statistics.find(stat).title) if roomy else str
    last = "last" if mixed or not rows else f"last {label(rows[0].stat)}"
    kind, why = ["statistic"] if mixed else [], ["why it stands out"] if roomy else []
    headings = ["", "site", *kind, last, "min", "max", "", *why]
    table = plain_table(*headings, right=(*_NUMERIC, last))
    names = look.fit_names([row.site.key for row in rows], look.width * 2 // 5)
    for row, name in zip(rows, names, strict=True):
        style = LEVEL_STYLES[row.mark.level]
        cells = [dot(row.mark.level, look), Text(name, style, no_wrap=True)]
        cells += [Text(label(row.stat), QUIET)] if mixed else []
        broken = bool(len(row.bad) and row.bad[-1])
        cells += [number(row.last, broken=broken), number(row.low), number(row.high)]
        cells += [spark_of(row, span, 28 if roomy else 11, look)]
        reason = Text(row.mark.reason, style)
        table.add_row(*cells, *([reason] if roomy else []))
        if reason and not roomy:
            # On a narrow page the reason stands below, where it does not squeeze the names.
            table.add_row("", reason)
    return table


def reading_table(readings: Sequence[tuple[Site, Reading]], look: Look) -> Table:
    """Return one row per site: the statistics of one step."""
    wide = look.width >= WIDE
    narrow = look.width < NARROW
    stats = ("mean", "std", "rms", "abs_max") if wide else ("rms", "abs_max") if narrow else ("mean", "rms", "abs_max")
    extra = ("zeros", "elements") if wide else () if narrow else ("zeros",)
    numbers = (*(statistics.find(stat).title for stat in stats), *extra, "not finite")
    table = plain_table("site", *numbers, right=numbers)
    room = max(20, look.width - 9 * len(stats) - 8 * len(extra) - 13)
    names = look.fit_names([site.key for site, _ in readings], room)
    for (site, reading), name in zip(readings, names, strict=True):
        zeros = reading.get("zero_share")
        style = BAD if reading.nonfinite else ""
        broken = reading.nonfinite > 0
        # A scalar is its value, which may be infinite; a mean is of finite elements.
        names = ["value" if stat == "mean" and site.quantity == "scalar" else stat for stat in stats]
        cells = [number(_or_nan(reading.get(name)), broken=broken) for name in names]
        if not narrow:
            cells.append(Text(ABSENT if zeros is None else f"{zeros:.0%}", QUIET))
        if wide:
            cells.append(Text(count(reading.count), QUIET))
        bad = Text(count(reading.nonfinite), style) if reading.nonfinite else Text("0", QUIET)
        table.add_row(Text(name, style, no_wrap=True), *cells, bad)
    return table


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


# --------------------------------------------------------------------------------
# Gradient flow as bars: one per layer, from the input to the output of the model, on a logarithmic scale.


MOST_ROWS = 24
_MOST_BAR = 56
_MOST_DECADES_BELOW = 2.0


def flow_bars(flow: Sequence[FlowRow], look: Look, *, most: int = MOST_ROWS) -> Group:
    """Draw the gradient of each layer as a bar, with its update ratio; a long model is thinned evenly."""
    shown = _thinned(flow, most)
    low, high = _scale([row.gradient for row in flow])
    names = max((len(row.name) for row in shown), default=0)
    names = max(len("layer"), min(names, look.width // 3))
    width = min(max(8, look.width - names - 2 - 10 - 10 - 2), _MOST_BAR)
    table: Table = plain_table("layer", "", "gradient", "update/w", right=("gradient", "update/w"))
    table.columns[0].max_width, table.columns[0].overflow = names, "ellipsis"
    table.columns[0].no_wrap = True
    for row, name in zip(shown, look.fit_names([row.name for row in shown], names), strict=True):
        style = LEVEL_STYLES[row.mark.level] or BAR
        share = _share(row.gradient, low, high)
        table.add_row(
            Text(name, LEVEL_STYLES[row.mark.level]),
            bar(share, width, look, style=style),
            number(row.gradient),
            ratio(row.ratio),
        )
    return Group(table, Text(_note(flow, shown, low, high), QUIET))


def _scale(values: Sequence[float]) -> tuple[float, float]:
    """Return the logarithms of where bars begin and of where they are full."""
    known = np.array([value for value in values if np.isfinite(value) and value > 0])
    if not len(known):
        return -1.0, 0.0
    logs = np.log10(known)
    # One layer that is far below the others must not flatten their differences: it gets no bar, which says enough.
    low = max(float(logs.min()) - 0.3, float(np.median(logs)) - _MOST_DECADES_BELOW)
    high = min(float(logs.max()), float(np.median(logs)) + _MOST_DECADES_BELOW)
    return min(low, high - 1.0), high


def _share(value: float, low: float, high: float) -> float:
    if not np.isfinite(value) or value <= 0:
        return 0.0
    return float((np.log10(value) - low) / (high - low))


def _thinned(flow: Sequence[FlowRow], most: int) -> list[FlowRow]:
    if len(flow) <= most:
        return list(flow)
    even = set(np.linspace(0, len(flow) - 1, most).round().astype(int).tolist())
    return [row for index, row in enumerate(flow) if index in even or row.mark.level != "fine"]


def _note(flow: Sequence[FlowRow], shown: Sequence[FlowRow], low: float, high: float) -> str:
    thinned = f"{len(shown)} of {len(flow)} layers; " if len(shown) < len(flow) else ""
    ends = f"from {short(power_of_ten(low))} to {short(power_of_ten(high))}"
    return f"{thinned}rms of the gradient of the weight, bars {ends}, logarithmic"


# --------------------------------------------------------------------------------
# One site in full: its curve, the histogram of its latest reading, and how the histogram moved over the steps.


_MOST_MARKS = 20


def render_site(run: Run, row: SiteSummary, look: Look) -> Iterator[RenderableType]:
    """Return the parts that show one site, below its row in the table."""
    if facts := _facts(row.site):
        yield Text(facts, QUIET)
    finite = row.values[np.isfinite(row.values)]
    if len(finite) > 1:
        statistic = statistics.find(row.stat)
        yield section_title(f"{statistic.title} over steps", look)
        spans_decades = bool(finite.min() > 0 and float(finite.max()) / float(finite.min()) > 10)
        options = PlotOptions(9, log=statistic.log and spans_decades, marks=_bad_steps(row))
        yield line_plot([Curve(row.steps, row.values)], look, options)
    steps, bins = run.histogram(row.site, start=int(row.steps[0]) if len(row.steps) else None)
    if len(steps):
        yield section_title(f"magnitudes at step {steps[-1]}", look)
        yield histogram_plot(bins[-1], look)
    if len(steps) > 1 and bins.any():
        yield section_title("magnitudes over steps", look)
        yield heat_map(_bins_over_steps(steps, bins, look), look)


def _facts(site: Site) -> str:
    shape = CROSS.join(map(str, site.shape))
    parts = [site.kind, shape, site.dtype]
    parts += [f"also {alias}" for alias in site.aliases]
    return "   " + "  ".join(part for part in parts if part) if any(parts) else ""


def section_title(text: str, look: Look) -> Group:
    """Return the line that begins a part of the page."""
    line = Rule(Text(text, TITLE), align="left", style=QUIET, characters=look.pick("─", "-"))
    return Group(Text(""), line)


def _bad_steps(row: SiteSummary) -> list[int]:
    return [int(step) for step in row.steps[row.bad][:_MOST_MARKS]]


def _bins_over_steps(steps: np.typing.NDArray[np.int64], bins: Bins, look: Look) -> HeatMap:
    ranges = [visible_bins(each) for each in bins[:: max(1, len(bins) // 100)] if each.any()]
    first, last = min(first for first, _ in ranges), max(last for _, last in ranges)
    edges = column_edges(int(steps[0]), int(steps[-1]), look.width - 8)
    cuts = np.searchsorted(steps, edges)
    shares = np.full((last - first + 1, len(edges) - 1), np.nan)
    for column, (start, stop) in enumerate(pairwise(cuts)):
        total = bins[start:stop, first : last + 1].sum(axis=0).astype(np.float64)
        if total.sum() > 0:
            shares[:, column] = np.where(total > 0, total / total.sum(), np.nan)
    # Large magnitudes on top, as on the axis of a plot.
    names = [power_of_two(index + schema.FIRST_EXPONENT, look) for index in range(first, last + 1)]
    right = f"{steps[-1]:,}"
    return HeatMap(shares[::-1], names[::-1], f"step {steps[0]:,}", right, log=False, unit="of all elements")
