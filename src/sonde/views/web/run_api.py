"""One run as a whole: facts, findings, health, phases and events."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
from starlette.routing import Route

from sonde.analysis import ending_of, events_of, facts_of, phase_shares
from sonde.analysis.source_lines import line_of
from sonde.diagnosis.second_opinion import was_judged
from sonde.records import Event, Finding, words_of
from sonde.store import Run
from sonde.views.document import ranked, when
from sonde.views.terminal.style import size
from sonde.views.web.answers import Query, run_route
from sonde.views.web.library import Library, OpenRun, is_inside

# --------------------------------------------------------------------------------
# Checkpoints beside a run, as events: files that a training saved, placed at the step it was at when it did.


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


# --------------------------------------------------------------------------------


_MOST_EVENTS: Final = 2000


def routes(library: Library) -> list[Route]:
    """Return the routes about one run as a whole."""
    return [run_route(library, "", _overview), run_route(library, "events", _events)]


def _overview(opened: OpenRun, query: Query) -> dict[str, Any]:
    run = opened.run
    quantities: dict[str, int] = {}
    for site in run.sites:
        quantities[site.quantity] = quantities.get(site.quantity, 0) + 1
    return {
        "id": opened.id,
        "name": opened.name,
        "version": opened.version,
        "facts": asdict(facts_of(run)) | {"status": opened.status},
        "ending": ending_of(run),
        "findings": [describe_finding(run, finding) for finding in ranked(run.findings)],
        "judged": was_judged(run),
        "phases": phase_shares(run),
        "quantities": quantities,
        "problems": run.problems[:50],
        "config": run.header.config,
        "environment": run.header.environment,
        "traces": [path.name for path in traces_of(opened)],
    }


def traces_of(opened: OpenRun) -> list[Path]:
    """Return the trace files of a run."""
    folder = opened.run.path / "traces"
    try:
        found = sorted(folder.glob("*.json*"))
    except OSError:
        return []
    return [path for path in found if is_inside(path, opened.run.path) and path.is_file()]


def describe_finding(run: Run, finding: Finding) -> dict[str, Any]:
    """Return a finding in plain values, with the words that all views use."""
    plain = finding.to_json()
    known = {site.key for site in run.sites}
    for item in plain["evidence"]:
        key, _, stat = item["series"].rpartition(" ")
        item["site"], item["stat"] = (key, stat) if key in known else (None, None)
    # The site whose curve shows it best: one that the evidence names, else one of the layer.
    named = [item["site"] for item in plain["evidence"] if item["site"]]
    named += [key for key in known for site in finding.sites if key.partition(":")[0] in (site, f"{site}.weight")]
    layer = min(named[:1] or sorted(named), default=None)
    words = {"title": words_of(finding.kind), "when": when(finding), "line": _source_line(finding), "layer": layer}
    return plain | words


def _source_line(finding: Finding) -> dict[str, str] | None:
    line = line_of(finding)
    return None if line is None else {"place": line.place, "code": line.text}


def _events(opened: OpenRun, query: Query) -> dict[str, Any]:
    events = sorted([*events_of(opened.run), *checkpoints_of(opened.run)], key=lambda event: event.timestamp)
    wanted = query.text("type")
    chosen = [event for event in events if not wanted or event.event_type == wanted]
    kinds: dict[str, int] = {}
    for event in events:
        kinds[event.event_type] = kinds.get(event.event_type, 0) + 1
    return {"total": len(chosen), "types": kinds, "events": [_run_api_event(event) for event in chosen[-_MOST_EVENTS:]]}


def _run_api_event(event: Event) -> dict[str, Any]:
    from sonde.views.terminal.events import event_level

    return {
        "type": event.event_type,
        "message": event.message[:2000],
        "step": event.step,
        "time": event.timestamp,
        "level": event_level(event),
        "data": event.data,
    }
