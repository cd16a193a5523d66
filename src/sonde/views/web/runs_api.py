"""The list of runs, and what a row of it says beyond that: a spark line and the worst finding."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path
from typing import Any

from starlette.routing import Route

from sonde.analysis import find_loss, thin
from sonde.store.pages.reader import notice_of_pickles
from sonde.views.document import ranked
from sonde.views.terminal.style import short
from sonde.views.web.answers import Query, plain_route, run_route
from sonde.views.web.library import Library, Listed, OpenRun

_SPARK_POINTS = 120
_PICKLED = ("", "*/", "*/epoch_*/")
_MOST_NOTICES = 5


def routes(library: Library) -> list[Route]:
    """Return the routes of the page *Runs*."""
    return [
        plain_route("runs", lambda query: _runs(library)),
        run_route(library, "card", _card),
    ]


def _runs(library: Library) -> dict[str, Any]:
    rows = [_row(each) for each in library.list()]
    notices = [] if rows else [each for root in library.roots for each in _notices(root)]
    return {"roots": [str(root) for root in library.roots], "runs": rows, "notices": notices}


def _notices(root: Path) -> list[str]:
    """Return how to read what an older tool wrote below a folder."""
    found = (page.parent for depth in _PICKLED for page in root.glob(f"{depth}debugger/page_0.pkl"))
    return list(filter(None, map(notice_of_pickles, islice(found, _MOST_NOTICES))))


def _row(listed: Listed) -> dict[str, Any]:
    run = listed.summary
    return {
        "id": listed.id,
        "name": listed.name,
        "status": "damaged" if run.problem else run.status,
        "model": run.model,
        "steps": run.steps,
        "last_step": run.last_step,
        # JSON has no NaN, and null says that none was logged.
        "last_loss": run.last_loss if run.last_loss is None or math.isfinite(run.last_loss) else short(run.last_loss),
        "attempts": run.attempts,
        "created": run.created,
        "updated": run.updated,
        "problem": run.problem,
    }


def _card(opened: OpenRun, query: Query) -> dict[str, Any]:
    run = opened.run
    findings = ranked(run.findings)
    worst = findings[0] if findings else None
    return {
        "version": opened.version,
        "spark": spark_of(opened),
        "findings": len(findings),
        "worst": None if worst is None else {"kind": worst.kind, "severity": worst.severity, "cause": worst.cause},
    }


def spark_of(opened: OpenRun) -> dict[str, Any] | None:
    """Return the loss as a few points, or None if the run has none."""
    loss = find_loss(opened.run.sites)
    if loss is None:
        return None
    series = opened.run.series(loss, "value")
    steps, values = thin(series.steps, series.values, _SPARK_POINTS)
    return {"name": loss.name, "steps": steps, "values": values}
