"""The sites of a run: searched by glob, and each one's readings in numbers."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from starlette.routing import Route

from sonde.analysis import ModelOrder, Steps, curves_of, describe, keys_of, layer_of, usual_stat
from sonde.core import statistics
from sonde.core.short_names import short_keys
from sonde.diagnosis.second_opinion import findings_of
from sonde.errors import SelectionError
from sonde.records import Site
from sonde.store import Run
from sonde.views.web.answers import Query, plain_route, run_route
from sonde.views.web.library import Library, OpenRun
from sonde.views.web.story_api import axes_of, shown_stat

_MOST_SITES: Final = 500
_NOT_TENSORS: Final = ("scalar", "vital")


def routes(library: Library) -> list[Route]:
    """Return the routes of the page *Layers*."""
    return [
        plain_route("statistics", _statistics),
        run_route(library, "sites", _sites),
        run_route(library, "site", _site),
        run_route(library, "steps", _steps),
    ]


def _statistics(query: Query) -> dict[str, Any]:
    """Return the table of statistics, and the quantities of tensors in the order in which pages list them."""
    return {
        "statistics": [
            {"name": row.name, "title": row.title, "unit": row.unit, "shown": row.shown, "quantity": row.quantity}
            for row in statistics.STATISTICS.values()
        ],
        "quantities": [quantity for quantity in statistics.USUAL if quantity not in _NOT_TENSORS],
    }


def find_sites(run: Run, pattern: str) -> list[Site]:
    """Return the sites whose key matches a glob or contains it; none is fine while the user is typing."""
    try:
        found = run.find(pattern) if pattern else run.sites
    except SelectionError:
        lowered = pattern.lower()
        found = [site for site in run.sites if lowered in site.key.lower()]
    order = ModelOrder(run.header, run.sites)
    return sorted(found, key=order.of_site)


def _sites(opened: OpenRun, query: Query) -> dict[str, Any]:
    found = [site for site in find_sites(opened.run, query.text("pattern").strip()) if site.quantity != "vital"]
    keys = keys_of(opened.run)
    most = query.number("most", _MOST_SITES, least=1, most=5000)
    short = short_keys([site.key for site in found[:most]])
    listed = [
        _plain(site, usual_stat(site, keys)) | {"short": name} for site, name in zip(found[:most], short, strict=True)
    ]
    return {"total": len(found), "sites": listed}


def _plain(site: Site, usual: str) -> dict[str, Any]:
    return {
        "key": site.key,
        "name": site.name,
        "quantity": site.quantity,
        "kind": site.kind,
        "shape": site.shape,
        "dtype": site.dtype,
        "layer": layer_of(site),
        "stat": usual,
    }


def _site(opened: OpenRun, query: Query) -> dict[str, Any]:
    """Describe one site: what it is, how a statistic of it went, and what it read last."""
    run = opened.run
    site, keys = run.site(query.text("site")), keys_of(run)
    stat = shown_stat(site, query.text("stat"), keys)
    series = run.series(site, stat)
    now = [row.name for row in statistics.STATISTICS.values() if row.shown == "always"]
    return _plain(site, usual_stat(site, keys)) | {
        "shown": stat,
        "aliases": site.aliases,
        "readings": len(series.steps),
        "trend": describe(series.steps, series.values),
        "last": {name: _last(run, site, name, series.steps) for name in now},
        "last_step": int(series.steps[-1]) if len(series.steps) else None,
        "findings": [finding.kind for finding in findings_of(run) if _names(finding.sites, site)],
    }


def _last(run: Run, site: Site, stat: str, steps: Steps) -> float:
    values = run.series(site, stat, start=int(steps[-1]) if len(steps) else None).values
    return float(values[-1]) if len(values) else float("nan")


def _names(named: tuple[str, ...], site: Site) -> bool:
    return any(name.partition(":")[0] in (site.name, layer_of(site)) for name in named)


def _steps(opened: OpenRun, query: Query) -> dict[str, Any]:
    """Return the steps of a run, few enough for a slider, and what else they may be measured in."""
    steps = opened.run.steps
    chosen = np.unique(np.linspace(0, len(steps) - 1, 1000).astype(np.int64)) if len(steps) > 1000 else slice(None)
    return {"steps": steps[chosen], "axes": dict(axes_of(opened.run, curves_of(opened.run, whole=False)))}
