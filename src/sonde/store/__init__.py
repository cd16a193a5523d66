"""A run on disk: written while it trains, read by anyone, at any time."""

from sonde.store.reader import Run, open_run
from sonde.store.series import Series
from sonde.store.writer import RunWriter

__all__ = ["Run", "RunWriter", "Series", "open_run"]
