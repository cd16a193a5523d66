"""Traces of a run: to download for Perfetto, and summed up by operator and by module."""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final

from starlette.responses import FileResponse, Response
from starlette.routing import Route

from sonde.core import files
from sonde.errors import RunDamaged
from sonde.views.web.answers import Query, raw_route, run_route
from sonde.views.web.library import Library, OpenRun
from sonde.views.web.run_api import traces_of

_MOST_BYTES: Final = 256 << 20  # of a trace, unpacked: more is for Perfetto, not for a table
_MOST_EVENTS: Final = 400_000
_PIECE: Final = 4 << 20
_MOST_EVENT: Final = 1 << 20  # characters of one event
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
    files.open_file(path).close()  # refuses what is not a regular file
    return FileResponse(path, filename=path.name, media_type="application/octet-stream")


def _summary(opened: OpenRun, query: Query) -> dict[str, Any]:
    events = _read(opened.file("traces", query.text("name")))
    return {
        "operators": _sums(event for event in events if event[0] == "cpu_op"),
        "kernels": _sums(event for event in events if event[0] == "kernel"),
        "modules": _sums(_modules(events)),
    }


_Event = tuple[str, str, str, float, float]
"""Category, name, thread, start and duration in microseconds: all that a table needs of an event."""


def _read(path: Path) -> list[_Event]:
    """Read the events of a trace that anyone may have written, piece by piece: a packed one may be huge."""
    try:
        with files.open_file(path) as file, _unpacked(path, file) as content:
            return list(islice(_events(content, path), _MOST_EVENTS))
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise RunDamaged(f"The trace {path.name} cannot be read: {error}") from None


def _unpacked(path: Path, file: BinaryIO) -> gzip.GzipFile | BinaryIO:
    return gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file


def _events(content: gzip.GzipFile | BinaryIO, path: Path) -> Iterator[_Event]:
    """Yield the events with a duration, holding a few megabytes at a time."""
    text, pieces = "", _pieces(content, path)
    while (begin := _BEGIN.search(text)) is None:
        text += next(pieces, "\0")
        if text.endswith("\0") or len(text) > _MOST_EVENT + _PIECE:
            raise RunDamaged(f"The trace {path.name} cannot be read: it lists no events.")
    text = text[begin.end() :]
    while True:
        at = 0
        while (found := _NEXT.match(text, at)) is not None and found[1] != "]":
            try:
                event, at = _DECODER.raw_decode(text, found.start(1))
            except ValueError:
                break  # the rest of it is in the next piece, if anywhere
            yield from _taken(event)
        text = text[at:]
        if found is not None and found[1] == "]":
            return
        more = next(pieces, "")
        if not more or len(text) > _MOST_EVENT + _PIECE:
            raise RunDamaged(f"The trace {path.name} cannot be read: it is damaged or cut short.")
        text += more


def _pieces(content: gzip.GzipFile | BinaryIO, path: Path) -> Iterator[str]:
    read, decode = 0, codecs.getincrementaldecoder("utf-8")("replace").decode
    while piece := content.read(_PIECE):
        read += len(piece)
        if read > _MOST_BYTES:
            raise RunDamaged(f"The trace {path.name} is too large for a table; download it and open it in Perfetto.")
        yield decode(piece)


_DECODER: Final = json.JSONDecoder()
_BEGIN: Final = re.compile(r'\A\s*\[|"traceEvents"\s*:\s*\[')
_NEXT: Final = re.compile(r"[\s,]*([^\s,])")


def _taken(event: Any) -> Iterator[_Event]:
    if not isinstance(event, dict):
        return
    start, duration = event.get("ts"), event.get("dur")
    if not isinstance(start, int | float) or not isinstance(duration, int | float):
        return
    if not (-_MOST_TIME < start < _MOST_TIME and -_MOST_TIME < duration < _MOST_TIME):
        return
    thread = f"{event.get('pid')!s:.40} {event.get('tid')!s:.40}"
    yield str(event.get("cat"))[:40], str(event.get("name", ""))[:200], thread, float(start), float(duration)


_MOST_TIME: Final = 1e300


def _modules(events: Iterable[_Event]) -> Iterator[_Event]:
    for category, name, thread, start, duration in events:
        if name.startswith("nn.Module: "):
            yield category, name.removeprefix("nn.Module: "), thread, start, duration


def _sums(events: Iterable[_Event]) -> list[dict[str, Any]]:
    """Add up durations by name, those with the largest time of their own first. Microseconds become milliseconds."""
    totals: dict[str, list[float]] = {}
    for (_, name, _, _, duration), own in _own_times(events):
        entry = totals.setdefault(name, [0.0, 0.0, 0])
        entry[0] += own
        entry[1] += duration
        entry[2] += 1
    largest = sorted(totals.items(), key=lambda item: -item[1][0])[:_MOST_ROWS]
    return [
        {"name": name, "own_ms": own / 1e3, "ms": total / 1e3, "calls": int(calls)}
        for name, (own, total, calls) in largest
    ]


def _own_times(events: Iterable[_Event]) -> Iterator[tuple[_Event, float]]:
    """Yield each event with its duration less that of the events inside it, on the same thread."""
    by_thread: dict[str, list[_Event]] = {}
    for event in events:
        by_thread.setdefault(event[2], []).append(event)
    for members in by_thread.values():
        members.sort(key=lambda event: (event[3], -event[4]))
        own = [event[4] for event in members]
        around: list[int] = []
        for index, (_, _, _, start, duration) in enumerate(members):
            while around and _end(members[around[-1]]) <= start:
                around.pop()
            if around:
                own[around[-1]] -= duration
            around.append(index)
        yield from zip(members, (max(each, 0.0) for each in own), strict=True)


def _end(event: _Event) -> float:
    return event[3] + event[4]
