"""One site in full: its curve, the histogram of its latest reading, and how the histogram moved over the steps."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.text import Text

from sonde import schema
from sonde.analysis import SiteSummary, column_edges
from sonde.core import statistics
from sonde.records import Site
from sonde.schema import Bins
from sonde.store import Run
from sonde.views.terminal.heatmap import HeatMap, heat_map
from sonde.views.terminal.histogram import histogram_plot, power_of_two, visible_bins
from sonde.views.terminal.look import CROSS, Look
from sonde.views.terminal.palette import QUIET, TITLE
from sonde.views.terminal.plot import Curve, PlotOptions, line_plot

_MOST_MARKS = 20


def render_site(run: Run, row: SiteSummary, look: Look) -> Iterator[RenderableType]:
    """Return the parts that show one site, below its row in the table."""
    if facts := _facts(row.site):
        yield Text(facts, QUIET)
    finite = row.values[np.isfinite(row.values)]
    if len(finite) > 1:
        statistic = statistics.find(row.stat)
        yield _title(f"{statistic.title} over steps", look)
        spans_decades = bool(finite.min() > 0 and float(finite.max()) / float(finite.min()) > 10)
        options = PlotOptions(9, log=statistic.log and spans_decades, marks=_bad_steps(row))
        yield line_plot([Curve(row.steps, row.values)], look, options)
    steps, bins = run.histogram(row.site, start=int(row.steps[0]) if len(row.steps) else None)
    if len(steps):
        yield _title(f"magnitudes at step {steps[-1]}", look)
        yield histogram_plot(bins[-1], look)
    if len(steps) > 1 and bins.any():
        yield _title("magnitudes over steps", look)
        yield heat_map(_bins_over_steps(steps, bins, look), look)


def _facts(site: Site) -> str:
    shape = CROSS.join(map(str, site.shape))
    parts = [site.kind, shape, site.dtype]
    parts += [f"also {alias}" for alias in site.aliases]
    return "   " + "  ".join(part for part in parts if part) if any(parts) else ""


def _title(text: str, look: Look) -> Group:
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
