"""Checkpoints beside a run, as events: files that a training saved, placed at the step it was at when it did."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from sonde.records import Event
from sonde.store import Run
from sonde.views.terminal.numbers import size
from sonde.views.web.library import is_inside

KIND: Final = "checkpoint"
_PATTERNS: Final = ("checkpoint*.pt", "epoch_*/checkpoint*.pt", "checkpoints/*.pt")
_MOST: Final = 1000
_LATE_S: Final = 60.0  # the last one is written after the last step


def checkpoints_of(run: Run) -> list[Event]:
    """Return an event for each checkpoint file in the folder of a run, in order of time. No file is opened.

    The step is that of the latest reading when the file was written. A file whose time lies outside the run, as after
    copying, has no step.
    """
    found = [path for pattern in _PATTERNS for path in run.path.glob(pattern) if is_inside(path, run.path)]
    events = [event for path in found[:_MOST] if (event := _event(run, path)) is not None]
    return sorted(events, key=lambda event: event.timestamp)


def _event(run: Run, path: Path) -> Event | None:
    try:
        status = path.stat()
    except OSError:
        return None  # replaced meanwhile
    name = path.relative_to(run.path).as_posix()
    step = _step_at(run, status.st_mtime)
    return Event(event_type=KIND, message=f"{name} ({size(status.st_size)})", step=step, timestamp=status.st_mtime)


def _step_at(run: Run, time: float) -> int | None:
    times = run.blocks.time
    if not len(times) or not times[0] <= time <= times[-1] + _LATE_S:
        return None
    return int(run.steps[np.searchsorted(times, time, side="right") - 1])
