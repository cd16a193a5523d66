"""Tables, trends and comparisons over a run. Pure functions of plain arrays; no drawing, no torch."""

from sonde.analysis.downsample import Steps, Values, any_in_columns, column_edges, columns, thin
from sonde.analysis.ending import ENDING_EVENTS, Ending, ending_of
from sonde.analysis.facts import RunFacts, count_steps, facts_of, find_learning_rate, find_loss
from sonde.analysis.flow import FlowRow, gradient_flow
from sonde.analysis.leaks import leaking, memory_slope, memory_slopes
from sonde.analysis.long_table import SiteRows, read_rows, windows
from sonde.analysis.news import News, Newspaper
from sonde.analysis.order import ModelOrder, layer_of
from sonde.analysis.phases import PhaseShares, phase_series, phase_shares
from sonde.analysis.summary import (
    DEFAULT_STATS,
    LayerSummary,
    SiteSummary,
    first_step,
    has_stat,
    keys_of,
    summarise_layers,
    summarise_sites,
    usual_stat,
    worst_first,
)
from sonde.analysis.trend import Trend, describe, smooth
from sonde.analysis.unusual import History, Level, Mark, mark_all
from sonde.core.robust import slope

__all__ = [
    "DEFAULT_STATS",
    "ENDING_EVENTS",
    "Ending",
    "FlowRow",
    "History",
    "LayerSummary",
    "Level",
    "Mark",
    "ModelOrder",
    "News",
    "Newspaper",
    "PhaseShares",
    "RunFacts",
    "SiteRows",
    "SiteSummary",
    "Steps",
    "Trend",
    "Values",
    "any_in_columns",
    "column_edges",
    "columns",
    "count_steps",
    "describe",
    "ending_of",
    "facts_of",
    "find_learning_rate",
    "find_loss",
    "first_step",
    "gradient_flow",
    "has_stat",
    "keys_of",
    "layer_of",
    "leaking",
    "mark_all",
    "memory_slope",
    "memory_slopes",
    "phase_series",
    "phase_shares",
    "read_rows",
    "slope",
    "smooth",
    "summarise_layers",
    "summarise_sites",
    "thin",
    "usual_stat",
    "windows",
    "worst_first",
]
