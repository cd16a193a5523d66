"""The story of a run on one step axis: verdict, curves in recorded values, layers as colours, events and findings."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence, Set
from dataclasses import asdict
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from starlette.routing import Route

from sonde.analysis import (
    ModelOrder,
    RunCurve,
    curves_of,
    events_of,
    has_stat,
    keys_of,
    layer_of,
    usual_stat,
    verdict_on,
)
from sonde.analysis.downsample import spaced
from sonde.analysis.run_curves import GRADIENT_NORM, LEARNING_RATE, UPDATE_RATIO, RunCurves, is_training_loss
from sonde.core import statistics
from sonde.core.short_names import short_keys
from sonde.diagnosis import nonfinite
from sonde.errors import SelectionError
from sonde.records import Event, Site, words_of
from sonde.store import Run
from sonde.views.document import count_findings, ranked
from sonde.views.figures.curves import Grid, as_grid, read_line, read_lines
from sonde.views.figures.theme import stat_title
from sonde.views.terminal.events import event_level
from sonde.views.web.answers import Query, run_route
from sonde.views.web.library import Library, OpenRun

MOST_POINTS: Final = 1500
_MOST_KNOTS: Final = 600
_MOST_BAD: Final = 400
_MOST_EVENTS: Final = 400
_MOST_COLUMNS: Final = 300
_MOST_ROWS: Final = 240
_ROUTINE: Final = ("epoch", "loss_seen", "tape", "cost", "budget", "program")
"""Events that do not belong to the story."""


def routes(library: Library) -> list[Route]:
    """Return the routes of what the pages show along the steps."""
    return [
        run_route(library, "story", _story),
        run_route(library, "heat", _heat),
        run_route(library, "curve", _curve),
    ]


def _story(opened: OpenRun, query: Query) -> dict[str, Any]:
    # The page asks for what is read at once first, and for norms over all layers after it has drawn that.
    run, whole = opened.run, not query.flag("quick")
    curves = curves_of(run, whole=whole)
    verdict = verdict_on(run, whole=whole)
    return {
        "verdict": asdict(verdict) | {"text": verdict.text, "metrics": [_metric(each) for each in verdict.metrics]},
        "first_step": int(run.steps[0]) if len(run.steps) else None,
        "last_step": int(run.steps[-1]) if len(run.steps) else None,
        "axes": dict(axes_of(run, curves)),
        "charts": list(_charts(curves)),
        "constants": curves.constants,
        "events": [_event(each) for each in _worth_showing(events_of(run, whole=whole))],
        "spans": _spans(run, is_broken=any(not np.isfinite(metric.last) for metric in verdict.metrics)),
        "found": count_findings(run.findings),
    }


def _metric(metric: Any) -> dict[str, Any]:
    plain = asdict(metric)
    # JSON has no NaN, and null would say that nothing was recorded.
    return plain | {name: describe_number(plain[name]) for name in ("last", "best")}


def describe_number(value: float) -> float | str:
    """Return a number for JSON; one that is not finite as text."""
    if np.isfinite(value):
        return value
    return "NaN" if np.isnan(value) else "∞" if value > 0 else "\N{MINUS SIGN}∞"


def _worth_showing(events: Sequence[Event]) -> list[Event]:
    worth_showing = [each for each in events if each.step is not None and each.event_type not in _ROUTINE]
    return worth_showing[-_MOST_EVENTS:]


def _event(event: Event) -> dict[str, Any]:
    return {
        "type": event.event_type,
        "step": event.step,
        "message": event.message[:400],
        "level": event_level(event),
        "cause": event.data.get("cause", ""),
    }


def _spans(run: Run, *, is_broken: bool) -> list[dict[str, Any]]:
    """Return the findings with the steps they held at: those that hold, and those that were withdrawn since.

    The first number that is not finite is found at one step; where a loss is broken to the end, so long it holds.
    """
    end = int(run.steps[-1]) if is_broken and len(run.steps) else 0
    spans = [(finding, False) for finding in ranked(run.findings)]
    spans += [(finding, True) for finding in run.closed_findings]
    return [
        {
            "kind": finding.kind,
            "title": words_of(finding.kind),
            "severity": finding.severity,
            "first": finding.step,
            "last": finding.last_step if closed or finding.kind not in nonfinite.KINDS else max(finding.last_step, end),
            "closed": closed,
            "cause": finding.cause,
        }
        for finding, closed in spans
    ]


# --------------------------------------------------------------------------------
# Curves.


def _charts(curves: RunCurves) -> Iterator[dict[str, Any]]:
    groups: list[tuple[str, str, list[RunCurve]]] = [
        ("loss", "loss", curves.of("loss")),
        *(("metric", curve.name, [curve]) for curve in curves.of("metric")),
        ("rate", LEARNING_RATE, curves.of("rate")),
        ("gradient", GRADIENT_NORM, curves.of("gradient")),
        ("update", UPDATE_RATIO, curves.of("update")),
    ]
    for role, title, members in groups:
        if members:
            smooths = role in ("loss", "metric") and any(is_training_loss(each) for each in members)
            yield {
                "role": role,
                "title": title,
                "held": role == "rate",
                "smooths": smooths or role in ("gradient", "update"),
                "log": role in ("gradient", "update"),
                "lines": [line_of(each.name, each.steps, each.values, key=each.key) for each in members],
            }


def line_of(name: str, steps: NDArray[Any], values: NDArray[np.float64], *, key: str = "") -> dict[str, Any]:
    """Return a curve in recorded values: all of them, or the last of each bucket with the lowest and highest in it."""
    finite = np.isfinite(values)
    bad = np.flatnonzero(~finite)
    kept = bad[np.unique(np.linspace(0, len(bad) - 1, min(len(bad), _MOST_BAD)).astype(int))] if len(bad) else bad
    line: dict[str, Any] = {
        "name": name,
        "key": key,
        "count": len(values),
        "bad": [[int(steps[at]), describe_number(float(values[at]))] for at in kept],
        "num_bad": len(bad),
    }
    steps, values = steps[finite], values[finite]
    if len(steps) <= MOST_POINTS:
        return line | {"steps": steps, "values": values, "thinned": False}
    starts = np.linspace(0, len(steps), MOST_POINTS + 1).astype(np.intp)[:-1]
    ends = np.append(starts[1:], len(steps)) - 1
    return line | {
        "steps": steps[ends],
        "values": values[ends],
        "from": steps[starts],
        "low": np.minimum.reduceat(values, starts),
        "high": np.maximum.reduceat(values, starts),
        "mean": np.add.reduceat(values, starts) / (ends - starts + 1),
        "thinned": True,
    }


def shown_stat(site: Site, wanted: str, keys: Set[str]) -> str:
    """Return the statistic that is asked for, or the usual one where a site has no such."""
    return wanted if wanted and has_stat(site, wanted, keys) else usual_stat(site, keys)


def axes_of(run: Run, curves: RunCurves) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what else steps may be measured in, at some of the steps: time, epochs, tokens."""
    steps, times = run.blocks.step, run.blocks.time
    if len(steps) > 1 and times[-1] > times[0]:
        yield "time", _knots(steps, times - times[0])
    counters = {curve.name.rpartition("/")[2].lower(): curve for curve in curves.counters}
    if "epoch" in counters:
        yield "epoch", _knots(counters["epoch"].steps, counters["epoch"].values)
    elif len(steps) and (run.blocks.epoch >= 0).any() and np.ptp(run.blocks.epoch[run.blocks.epoch >= 0]):
        known = run.blocks.epoch >= 0
        yield "epoch", _knots(steps[known], run.blocks.epoch[known].astype(np.float64))
    for name in ("tokens", "num_tokens", "samples"):
        if name in counters:
            yield "tokens" if "tokens" in name else name, _knots(counters[name].steps, counters[name].values)
            return


def _knots(steps: NDArray[Any], values: NDArray[np.float64]) -> dict[str, Any]:
    at = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), _MOST_KNOTS)).astype(int))
    return {"steps": steps[at], "values": values[at]}


def _curve(opened: OpenRun, query: Query) -> dict[str, Any]:
    """Return one statistic of some sites, as the page draws it."""
    run, keys = opened.run, keys_of(opened.run)
    sites = [run.site(key) for key in query.texts("site")[:40]]
    stat = shown_stat(sites[0], query.text("stat"), keys) if sites else "rms"
    lines = []
    for site, name in zip(sites, short_keys([site.key for site in sites]), strict=True):
        read = read_line(run, site, "value" if site.quantity == "scalar" else stat)
        line = line_of(name, read.steps, read.values, key=site.key)
        broken = read.steps[read.bad & np.isfinite(read.values)]
        line["bad"] = sorted([*line["bad"], *([int(step), "NaN or ∞ inside"] for step in broken[:_MOST_BAD])])
        lines.append(line | {"num_bad": int(read.bad.sum())})
    quantities = {site.quantity for site in sites}
    title = stat_title(stat, quantities.pop() if len(quantities) == 1 else "")
    return {"title": title, "lines": lines, "log": statistics.find(stat).log, "smooths": True, "held": False}


# --------------------------------------------------------------------------------
# Layers over steps.


def _heat(opened: OpenRun, query: Query) -> dict[str, Any]:
    """Return layers by steps: rows that are marked or evenly spread, columns of the most unusual reading of each."""
    run, keys = opened.run, keys_of(opened.run)
    order = ModelOrder(run.header, run.sites)
    pattern = query.text("pattern", "*:gradient")
    matching = find_matching(run, pattern)
    found = [site for site in matching if site.quantity not in ("vital", "scalar") and site.same_as is None]
    found.sort(key=order.of_site)
    if query.flag("layers"):
        found = _one_per_layer(found)
    stat = query.text("stat") or (usual_stat(found[0], keys) if found else "rms")
    most = query.number("rows", _MOST_ROWS, least=1, most=1000) or _MOST_ROWS
    shown = spaced([site for site in found if not statistics.find(stat).over or f"{site.name}:parameter" in keys], most)
    log = statistics.find(stat).log
    grid = as_grid(read_lines(run, shown, stat), log=log, most=_MOST_COLUMNS)
    quantities = {site.quantity for site in shown}
    what = stat_title(stat, quantities.pop() if len(quantities) == 1 else "")
    return _packed(grid) | {"total": len(found), "log": log, "what": what, "stat": stat}


def find_matching(run: Run, pattern: str) -> list[Site]:
    """Return the sites that match; a run may have none of a quantity, but a typed pattern must match."""
    try:
        return run.find(pattern)
    except SelectionError:
        if pattern.partition(":")[0] == "*":
            return []
        raise


def _one_per_layer(sites: Sequence[Site]) -> list[Site]:
    """Return the largest tensor of each layer."""
    largest: dict[str, Site] = {}
    for site in sites:
        rival = largest.get(layer_of(site))
        if rival is None or int(np.prod(site.shape or (1,))) > int(np.prod(rival.shape or (1,))):
            largest[layer_of(site)] = site
    return list(largest.values())


def _packed(grid: Grid) -> dict[str, Any]:
    values = np.where(np.isfinite(grid.values), grid.values, np.nan).astype("<f4")
    return {
        "keys": grid.names,
        "names": short_keys(grid.names),
        "steps": grid.steps,
        "values": base64.b64encode(values.tobytes()).decode(),
        "bad": [[int(row), int(column)] for row, column in np.argwhere(grid.bad)[:4000]],
        "thinned": grid.thinned,
    }
