"""The list of runs, and the row that each has in a table: settings, metrics, what is wrong, a spark line."""

from __future__ import annotations

import math
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, Final

from starlette.routing import Route

from sonde.analysis import find_loss, thin
from sonde.analysis.sweep import RunRow, Spread, differing, group_rows, read_row, usual_grouping
from sonde.errors import RunError
from sonde.store.header import LABELS
from sonde.store.pages.reader import notice_of_pickles
from sonde.views.terminal.style import short
from sonde.views.web.answers import Query, plain_route
from sonde.views.web.library import Library, Listed, OpenRun, is_inside
from sonde.views.web.sample_store import Kept, stamp_of

_SPARK_POINTS: Final = 120
_PICKLED: Final = ("", "*/", "*/epoch_*/")
_MOST_NOTICES: Final = 5
_MOST_ROWS: Final = 2000


def routes(library: Library) -> list[Route]:
    """Return the routes of the page *Runs*."""
    rows = Rows(library)
    return [plain_route("runs", lambda query: _runs(library)), plain_route("rows", rows.answer)]


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
        "last_loss": said(run.last_loss),
        "attempts": run.attempts,
        "created": run.created,
        "updated": run.updated,
        "labelled": stamp_of(run.path / LABELS)[0],
        "problem": run.problem,
    }


def said(value: float | None) -> float | str | None:
    """Return a number as JSON can hold it: JSON has no NaN, and null means that none was logged."""
    return value if value is None or math.isfinite(value) else short(value)


class Rows:
    """Reads rows, and keeps those of runs that have not changed."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._kept = Kept(_MOST_ROWS)

    def answer(self, query: Query) -> dict[str, Any]:
        """Describe the runs that are named, or all; with `by` also groups of those with the same settings."""
        wanted = query.texts("run")
        listed = [each for each in self._library.list() if not wanted or each.id in wanted]
        read = {each.id: self._read(each) for each in listed[:_MOST_ROWS] if not each.summary.problem}
        rows = {run: row for run, (row, _) in read.items() if isinstance(row, RunRow)}
        names = {id(row): run for run, row in rows.items()}
        groups = group_rows(list(rows.values()), query.texts("by")) if query.texts("by") else []
        return {
            "rows": {run: describe_row(row, spark) for run, (row, spark) in read.items()},
            "differing": differing(list(rows.values())),
            "grouping": usual_grouping(list(rows.values())),
            "groups": [
                {
                    "name": group.name,
                    "runs": [names[id(row)] for row in group.rows],
                    "last": {name: _spread(each) for name, each in group.last.items()},
                    "best": {name: _spread(each) for name, each in group.best.items()},
                    "troubles": group.troubles,
                }
                for group in groups
            ],
        }

    def _read(self, listed: Listed) -> tuple[RunRow | str, dict[str, Any] | None]:
        run = listed.summary
        labels = run.path / LABELS
        stamp = (run.status, run.last_step, run.steps, stamp_of(labels) if is_inside(labels, run.path) else 0)
        return self._kept.get(listed.id, stamp, lambda: self._describe(listed))

    def _describe(self, listed: Listed) -> tuple[RunRow | str, dict[str, Any] | None]:
        try:
            opened = self._library.open(listed.id)
            return read_row(opened.run, opened.name), spark_of(opened)
        except (RunError, OSError) as error:
            return str(error), None


def describe_row(row: RunRow | str, spark: dict[str, Any] | None) -> dict[str, Any]:
    """Return a row in plain values; of a run that cannot be read, why not."""
    if isinstance(row, str):
        return {"problem": row}
    metrics = {
        name: asdict(metric) | {"last": said(metric.last), "best": said(metric.best)}
        for name, metric in row.metrics.items()
    }
    return asdict(row) | {"metrics": metrics, "severity": row.severity, "spark": spark}


def _spread(spread: Spread) -> dict[str, Any]:
    return asdict(spread) | {"mean": said(spread.mean), "deviation": said(spread.deviation)}


def spark_of(opened: OpenRun) -> dict[str, Any] | None:
    """Return the loss as a few points, or None if the run has none."""
    loss = find_loss(opened.run.sites)
    if loss is None:
        return None
    series = opened.run.series(loss, "value")
    steps, values = thin(series.steps, series.values, _SPARK_POINTS)
    return {"name": loss.name, "steps": steps, "values": values}
