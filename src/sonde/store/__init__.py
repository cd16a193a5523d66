"""A run on disk: written while it trains, read by anyone, at any time."""

from sonde.store.log.attempts import Attempt
from sonde.store.log.reader import Run, open_run
from sonde.store.log.table import Blocks
from sonde.store.log.writer import RunWriter
from sonde.store.pages import BatchValue, DebugOutputs, PageWriter, load_debug_outputs
from sonde.store.runs import RunSummary, list_runs
from sonde.store.series import Series
from sonde.store.verify import Problem, Report, verify

__all__ = [
    "Attempt",
    "BatchValue",
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
