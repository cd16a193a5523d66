"""What a program printed, the code that it ran, and where it ran."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from starlette.routing import Route

from sonde.analysis import phase_shares
from sonde.analysis.scores import find_evaluations
from sonde.store.layout import CAPTURES
from sonde.store.logs import LOGS, Output, SourceFile, read_code, read_output
from sonde.views.web.answers import Query, run_route
from sonde.views.web.library import Library, OpenRun, is_inside
from sonde.views.web.run_api import traces_of
from sonde.views.web.sample_store import refuse_links

_MOST_LINES: Final = 5000


def routes(library: Library) -> list[Route]:
    """Return the route of the page *Logs*, and of which pages a run has anything for."""
    return [run_route(library, "logs", _logs), run_route(library, "parts", _parts)]


def _parts(opened: OpenRun, query: Query) -> dict[str, bool]:
    """Return which pages have something to show; the bar folds the others away."""
    run = opened.run
    evaluations = find_evaluations(run.path)
    return {
        "samples": any(each.has_scores for each in evaluations),
        "contrast": any(each.has_scores and each.has(CAPTURES) for each in evaluations),
        "tape": bool(run.tapes()),
        "profile": bool(traces_of(opened)) or bool(phase_shares(run)),
        "ranks": len(run.ranks) > 1,
    }


def _logs(opened: OpenRun, query: Query) -> dict[str, Any]:
    path = opened.run.path
    output: Output | None = None
    code: list[SourceFile] = []
    if is_inside(path / LOGS, path) and (path / LOGS).is_dir():
        refuse_links(path / LOGS, path)
        output, code = read_output(path), read_code(path)
    lines = output.lines[-_MOST_LINES:] if output is not None else ()
    total = 0 if output is None else len(output.lines)
    printed = output and {"lines": [asdict(each) for each in lines], "total": total, "cut": output.cut}
    return {
        "output": printed,
        "code": [asdict(each) for each in code],
        "environment": opened.run.header.environment,
    }
