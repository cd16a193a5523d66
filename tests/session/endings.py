"""Find the event that says how a run ended; what is known only at the end may be stated after it."""

from __future__ import annotations

from sonde import Run
from sonde.analysis.overview import ENDING_EVENTS
from sonde.records import Event


def ending_of(run: Run) -> Event:
    """Return the last event about an end."""
    return [event for event in run.events if event.event_type in ENDING_EVENTS][-1]
