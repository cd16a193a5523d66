"""Runs in a terminal: curves, tables, heat maps and the summary page."""

from sonde.views.terminal.events import event_level, event_line, event_table
from sonde.views.terminal.flow_bars import flow_bars
from sonde.views.terminal.heatmap import HeatMap, heat_map
from sonde.views.terminal.histogram import histogram_plot
from sonde.views.terminal.image import picture
from sonde.views.terminal.look import Look, make_console
from sonde.views.terminal.news_line import news_line
from sonde.views.terminal.plot import Curve, PlotOptions, line_plot
from sonde.views.terminal.progress import TrainingProgress
from sonde.views.terminal.site_page import render_site
from sonde.views.terminal.spark import bar, sparkline
from sonde.views.terminal.summary import Page, print_summary, read_page
from sonde.views.terminal.tables import layer_table, reading_table, site_table

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
