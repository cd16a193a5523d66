"""A run on disk: written while it trains, read by anyone, at any time."""

from sonde.store.attempts import Attempt
from sonde.store.catalog import RunSummary, list_runs
from sonde.store.pages import DebugOutputs, PageWriter, load_debug_outputs
from sonde.store.reader import Run, open_run
from sonde.store.series import Series
from sonde.store.table import Blocks
from sonde.store.verify import Problem, Report, verify
from sonde.store.writer import RunWriter

__all__ = [
    "Attempt",
    "Blocks",
    "DebugOutputs",
    "PageWriter",
    "Problem",
    "Report",
    "Run",
    "RunSummary",
    "RunWriter",
    "Series",
    "list_runs",
    "load_debug_outputs",
    "open_run",
    "verify",
]
