"""What taped steps of a run computed, as trees that fold by module."""

from __future__ import annotations

from typing import Any, Final

from starlette.routing import Route

from sonde.analysis.step_outline import Node, outline
from sonde.core import tape as tapes
from sonde.views.web.answers import Query, run_route
from sonde.views.web.library import Library, OpenRun

_MOST_LINES: Final = 4000
"""Lines of one tape that are sent; deeper ones are only counted."""


def routes(library: Library) -> list[Route]:
    """Return the route of the page *Tape*."""
    return [run_route(library, "tape", _tape)]


def _tape(opened: OpenRun, query: Query) -> dict[str, Any]:
    return {"tapes": [describe(tapes.read(folder)) for folder in tapes.folders(opened.run.path).values()]}


def describe(tape: tapes.Tape) -> dict[str, Any]:
    """Return a tape as the page shows it."""
    nodes = outline(tape)
    _fold(nodes)
    return {
        "step": tape.step,
        "reason": tapes.REASONS[tape.reason],
        "operations": len(tape.ops),
        "notes": [each for each in (tape.truncated, tape.incomplete) if each],
        "nodes": [each.to_json(tape) for each in nodes],
    }


def _fold(nodes: list[Node]) -> None:
    """Cut off the levels of a tree that would be too much to send, from below; the first one always stays."""
    level, lines = nodes, 0
    while level:
        lines += len(level)
        below = [child for each in level for child in each.children]
        if lines + len(below) > _MOST_LINES:
            for each in level:
                if each.children:
                    each.title += f" ({each.count():,} operations)"
                    each.children = []
            return
        level = below
