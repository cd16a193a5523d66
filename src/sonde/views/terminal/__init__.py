"""Runs in a terminal: curves, tables, heat maps and the summary page."""

from sonde.views.terminal.bars import bar, picture, sparkline
from sonde.views.terminal.events import event_level, event_line, event_table, news_line
from sonde.views.terminal.heatmap import HeatMap, heat_map, histogram_plot
from sonde.views.terminal.plot import Curve, PlotOptions, line_plot
from sonde.views.terminal.progress import TrainingProgress
from sonde.views.terminal.style import Look, make_console
from sonde.views.terminal.summary import Page, print_summary, read_page
from sonde.views.terminal.tables import flow_bars, layer_table, reading_table, render_site, site_table

__all__ = [
    "Curve",
    "HeatMap",
    "Look",
    "Page",
    "PlotOptions",
    "TrainingProgress",
    "bar",
    "event_level",
    "event_line",
    "event_table",
    "flow_bars",
    "heat_map",
    "histogram_plot",
    "layer_table",
    "line_plot",
    "make_console",
    "news_line",
    "picture",
    "print_summary",
    "read_page",
    "reading_table",
    "render_site",
    "site_table",
    "sparkline",
]
