"""Report whether a run has changed: as a stream of events, or by polling."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Final

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from sonde.views.web.answers import Query, as_json, raw_route
from sonde.views.web.library import Library, OpenRun

_LOOK_S: Final = 1.0
_SIGN_OF_LIFE: Final = 15  # looks after which an idle stream sends a keep-alive
MOST_STREAMS: Final = 64
STREAM: Final = "live"


def pulse(opened: OpenRun) -> dict[str, Any]:
    """Return what changes when a run does."""
    version, steps = opened.refresh(), opened.run.steps
    return {
        "version": version,
        "status": opened.status,
        "last_step": int(steps[-1]) if len(steps) else None,
        "findings": len(opened.run.findings),
    }


def routes(library: Library) -> list[Route]:
    """Return the routes that report changes."""
    streams = [0]

    async def live(request: Request) -> Response:
        opened = await run_in_threadpool(library.open, request.path_params["run"])
        if streams[0] >= MOST_STREAMS:
            return Response("Too many windows listen; this one must ask instead.", 503)
        return StreamingResponse(stream(opened.id), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    async def stream(run: str) -> AsyncIterator[str]:
        streams[0] += 1
        sent, silent = None, 0
        try:
            while True:
                now = await run_in_threadpool(lambda: pulse(library.open(run)))
                if now != sent:
                    yield f"id: {now['version']}\ndata: {json.dumps(now, allow_nan=False)}\n\n"
                    sent, silent = now, 0
                elif (silent := silent + 1) >= _SIGN_OF_LIFE:
                    yield ": still here\n\n"
                    silent = 0
                await asyncio.sleep(_LOOK_S)
        finally:
            streams[0] -= 1

    return [
        Route(f"/api/run/{{run}}/{STREAM}", live),
        raw_route(library, "pulse", _pulse),
    ]


def _pulse(opened: OpenRun, query: Query) -> Response:
    return as_json(pulse(opened))
