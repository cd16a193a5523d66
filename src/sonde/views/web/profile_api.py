"""Traces of a run: to download for Perfetto, and summed up by operator and by module."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from starlette.responses import FileResponse, Response
from starlette.routing import Route

from sonde.errors import RunDamaged
from sonde.views.web.answers import Query, raw_route, run_route
from sonde.views.web.library import Library, OpenRun
from sonde.views.web.run_api import traces_of

_MOST_BYTES: Final = 256 << 20  # of a trace, unpacked: more is for Perfetto, not for a table
_MOST_ROWS: Final = 100


def routes(library: Library) -> list[Route]:
    """Return the routes of the page *Profile*."""
    return [
        run_route(library, "traces", _traces),
        run_route(library, "trace-summary", _summary),
        raw_route(library, "trace/{name}", _download),
    ]


def _traces(opened: OpenRun, query: Query) -> dict[str, Any]:
    return {"traces": [{"name": path.name, "bytes": path.stat().st_size} for path in traces_of(opened)]}


def _download(opened: OpenRun, query: Query) -> Response:
    path = opened.file("traces", query.path["name"])
    return FileResponse(path, filename=path.name, media_type="application/octet-stream")


def _summary(opened: OpenRun, query: Query) -> dict[str, Any]:
    events = _read(opened.file("traces", query.text("name")))
    return {
        "operators": _sums(event for event in events if event.get("cat") == "cpu_op"),
        "kernels": _sums(event for event in events if event.get("cat") == "kernel"),
        "modules": _sums(_modules(events)),
    }


def _read(path: Path) -> list[dict[str, Any]]:
    """Read the events of a trace that anyone may have written."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        content = json.loads(text) if len(text) <= _MOST_BYTES else None
    except (OSError, EOFError, ValueError, RecursionError) as error:
        raise RunDamaged(f"The trace {path.name} cannot be read: {error}") from None
    if content is None:
        raise RunDamaged(f"The trace {path.name} is too large for a table; download it and open it in Perfetto.")
    listed = content.get("traceEvents") if isinstance(content, dict) else content
    events = listed if isinstance(listed, list) else []
    return [event for event in events if isinstance(event, dict) and isinstance(event.get("dur"), int | float)]


def _modules(events: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    for event in events:
        name = str(event.get("name", ""))
        if name.startswith("nn.Module: "):
            yield event | {"name": name.removeprefix("nn.Module: ")}


def _sums(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add up durations by name, those with the largest time of their own first. Microseconds become milliseconds."""
    totals: dict[str, list[float]] = {}
    for event, own in _own_times(events):
        entry = totals.setdefault(str(event.get("name", ""))[:200], [0.0, 0.0, 0])
        entry[0] += own
        entry[1] += float(event["dur"])
        entry[2] += 1
    largest = sorted(totals.items(), key=lambda item: -item[1][0])[:_MOST_ROWS]
    return [
        {"name": name, "own_ms": own / 1e3, "ms": total / 1e3, "calls": int(calls)}
        for name, (own, total, calls) in largest
    ]


def _own_times(events: Iterable[dict[str, Any]]) -> Iterable[tuple[dict[str, Any], float]]:
    """Yield each event with its duration less that of the events inside it, on the same thread."""
    by_thread: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for event in events:
        if isinstance(event.get("ts"), int | float):
            by_thread.setdefault((str(event.get("pid")), str(event.get("tid"))), []).append(event)
    for members in by_thread.values():
        members.sort(key=lambda event: (event["ts"], -event["dur"]))
        own = [float(event["dur"]) for event in members]
        around: list[int] = []
        for index, event in enumerate(members):
            while around and _end(members[around[-1]]) <= event["ts"]:
                around.pop()
            if around:
                own[around[-1]] -= float(event["dur"])
            around.append(index)
        yield from zip(members, (max(each, 0.0) for each in own), strict=True)


def _end(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"])
