"""The ranks of a run: what each does, how fast it is, and the stacks of those that are stuck."""

from __future__ import annotations

from typing import Any, Final

from starlette.responses import Response
from starlette.routing import Route

from sonde.analysis.ranks import RankRow, read_ranks
from sonde.errors import OptionError
from sonde.store.ranks import collectives_of, stacks_of
from sonde.views.figures.ranks import SHOWN, compared_sites
from sonde.views.web.answers import Query, as_json, raw_route
from sonde.views.web.library import Library, OpenRun

_MOST_ROWS: Final = 2048
_MOST_SITES: Final = 300
_COLUMNS: Final = 256


def routes(library: Library) -> list[Route]:
    """Return the routes of the page *Ranks*. Heartbeats change without the run's data: answers are not kept."""
    return [raw_route(library, "ranks", _ranks), raw_route(library, "rank/{rank}", _rank)]


def _ranks(opened: OpenRun, query: Query) -> Response:
    page = read_ranks(opened.run.path, most=_COLUMNS)
    rows = page.worst_first()
    sites = compared_sites(opened.run)[:_MOST_SITES] if page.rows else []
    return as_json(
        {
            "total": len(rows),
            "shown": SHOWN,
            "ranks": [_plain(row) for row in rows[:_MOST_ROWS]],
            "findings": [{"kind": each.kind, "severity": each.severity, "cause": each.cause, "fix": each.fix}
                         for each in page.findings],
            "sites": [site.key for site in sites],
        }
    )  # fmt: skip


def _plain(row: RankRow) -> dict[str, Any]:
    beat, score = row.beat, row.score
    return {
        "rank": row.rank,
        "condition": row.condition,
        "step": None if beat is None else beat.step,
        "phase": None if beat is None else beat.phase,
        "collective": "" if beat is None else beat.collective,
        "still_s": row.still_s,
        "own_s": None if score is None else score.own_s,
        "wait_s": None if score is None else score.wait_s,
        "relative": None if score is None else score.relative,
        "individual": None if score is None else score.individual,
        "host": "" if beat is None else beat.host,
        "pid": None if beat is None else beat.pid,
        "device": "" if beat is None else beat.device,
        "memory": None if beat is None else beat.device_memory if beat.device_memory is not None else beat.memory,
        "where": "" if beat is None else beat.where,
        "module": "" if beat is None else beat.module,
        "stacks": beat is not None and beat.stacks,
    }


def _rank(opened: OpenRun, query: Query) -> Response:
    """Return what a rank left when it stood still."""
    given = query.path["rank"]
    if not given.isascii() or not given.isdigit():
        raise OptionError(f"{given!r:.40} is not the number of a rank.")
    rank = int(given)
    return as_json(
        {"rank": rank, "stacks": stacks_of(opened.run.path, rank), "collectives": collectives_of(opened.run.path, rank)}
    )
