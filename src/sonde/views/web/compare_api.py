"""Several runs beside each other: settings, curves, where they part, and how their layers differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sonde.analysis import facts_of
from sonde.analysis.contrast import Contrast, Separation
from sonde.analysis.divergence import Divergence, divergence
from sonde.analysis.sweep import Group, flatten, group_rows, layers_apart, read_row, settings_of
from sonde.errors import OptionError
from sonde.store import Run
from sonde.views import figures
from sonde.views.figures.theme import empty, finish, graph_objects, safe
from sonde.views.web.answers import Query, plain_route
from sonde.views.web.figures_api import pack
from sonde.views.web.library import Library, OpenRun
from sonde.views.web.sample_store import sample_text

# --------------------------------------------------------------------------------
# Scores over epochs as a figure: a line a run, and for repeats their mean with a band of one deviation.


_BAND: Final = "rgba(120, 140, 160, 0.25)"


def draw_scores(lines: list[dict[str, Any]], groups: list[dict[str, Any]], metric: str) -> Any:
    """Draw the scores of runs over epochs, and the mean of repeats with a band of one deviation."""
    title = "Scores over epochs"
    if not any(line["points"] for line in lines):
        return empty(title, "No evaluation has this score.")
    figure = graph_objects().Figure()
    for group in groups:
        _add_band(figure, group)
    for line in lines:
        points = line["points"]
        figure.add_scatter(
            x=[point["name"] for point in points],
            y=[point["value"] for point in points],
            mode="lines+markers" if len(points) > 1 else "markers",
            name=safe(line["name"]),
            hovertemplate="%{x}: %{y:.4g}<extra>%{fullData.name}</extra>",
        )
    many = len(lines) > 1
    note = f"{metric} of whole evaluations" + ("; band: mean of repeats ± one deviation" if groups else "")
    order = dict.fromkeys(point["name"] for line in lines for point in line["points"])
    axis = {"type": "category", "categoryorder": "array", "categoryarray": list(order), "title": {"text": "epoch"}}
    return finish(figure, title, note, xaxis=axis, showlegend=many, height=300)


def _add_band(figure: Any, group: dict[str, Any]) -> None:
    points = [point for point in group["points"] if point["spread"] is not None]
    if not points:
        return
    names = [point["name"] for point in points]
    upper = [point["value"] + point["spread"] for point in points]
    lower = [point["value"] - point["spread"] for point in points]
    quiet = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
    figure.add_scatter(x=names, y=upper, **quiet)
    figure.add_scatter(x=names, y=lower, fill="tonexty", fillcolor=_BAND, **quiet)
    figure.add_scatter(
        x=names,
        y=[point["value"] for point in points],
        customdata=[[point["spread"], point["count"]] for point in points],
        mode="lines",
        line={"dash": "dot", "color": "#78909c"},
        name=safe(f"{group['name']}: mean of {len(group['runs'])}"),
        hovertemplate="%{x}: %{y:.4g} ± %{customdata[0]:.2g} (%{customdata[1]} runs)<extra>%{fullData.name}</extra>",
    )


# --------------------------------------------------------------------------------
# What separates failed samples from good ones, as the page *Good against failed* takes it.


_MOST_SEPARATIONS: Final = 60
_DRAWN: Final = 12
_EXAMPLES: Final = 8


def describe_contrast(found: Contrast) -> dict[str, Any]:
    """Return what separates best, with the values of the first few to be drawn, and samples to look at."""
    return {
        "failed": len(found.failed),
        "good": len(found.good),
        "features": found.features,
        "rough": found.is_rough,
        "of_batches": list(found.of_batches[:_MOST_SEPARATIONS]),
        "separations": [
            _separation(each, found.values[each.feature] if rank < _DRAWN else None, len(found.failed))
            for rank, each in enumerate(found.separations[:_MOST_SEPARATIONS])
        ],
        "examples": _examples(found),
    }


def _separation(each: Separation, values: NDArray[np.float64] | None, failed: int) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "words": each.feature.words,
        "debugger": each.feature.debugger,
        "path": each.feature.path,
        "statistic": each.feature.statistic,
        "channel": each.feature.channel,
        "effect": each.effect,
        "d": each.cohens_d,
        "p": each.p,
        "q": each.q,
        "failed_median": each.failed_median,
        "good_median": each.good_median,
        "also": [feature.words for feature in each.also],
    }
    if values is not None:
        plain |= {"failed_values": values[:failed], "good_values": values[failed:]}
    return plain


def _examples(found: Contrast) -> dict[str, list[str]]:
    """Return the worst of the failed and the best of the good."""
    return {
        "failed": [sample_text(each) for each in found.failed[:_EXAMPLES]],
        "good": [sample_text(each) for each in found.good[::-1][:_EXAMPLES]],
    }


# --------------------------------------------------------------------------------


MOST_RUNS: Final = 500
_MOST_PARTED: Final = 8
_APART: Final = 0.01
_MOST_SETTINGS: Final = 2000
_MOST_TOGETHER: Final = 20
_MOST_LAYERS: Final = 200
_MOST_CURVES: Final = 40


def routes(library: Library) -> list[Route]:
    """Return the routes of the page *Compare*."""

    def figure(request: Request) -> Response:
        query = Query(request)
        opened = _open(library, query)
        site, stat = query.text("site") or None, query.text("stat") or None
        groups = {each.name: [row.name for row in each.rows] for each in _grouped(opened, query.texts("by"))}
        if groups:
            made = figures.compare_groups(groups, _by_name(opened), site, stat=stat)
        else:
            made = figures.compare_runs(_by_name(opened[:_MOST_CURVES]), site, stat=stat)
        return Response(pack(made), media_type="application/json")

    return [
        plain_route("compare", lambda query: compare(_open(library, query))),
        plain_route("compare/parting", lambda query: _partings(_open(library, query))),
        plain_route("compare/layers", lambda query: compare_layers(_open(library, query), query.texts("by"))),
        Route("/api/compare/figure", figure),
    ]


def _open(library: Library, query: Query) -> list[OpenRun]:
    ids = query.texts("run")
    if not ids or len(ids) > MOST_RUNS:
        raise OptionError(f"Name between 1 and {MOST_RUNS} runs to compare; got {len(ids)}.")
    return [library.open(each) for each in ids]


def _grouped(opened: list[OpenRun], by: Sequence[str]) -> list[Group]:
    if not by:
        return []
    return group_rows([read_row(run, name) for name, run in _by_name(opened).items()], by)


def _by_name(opened: list[OpenRun]) -> dict[str, Run]:
    """Name runs for a legend; those of the same name, from several folders, by their ids."""
    names = [each.name for each in opened]
    return {each.name if names.count(each.name) == 1 else each.id: each.run for each in opened}


def compare(opened: list[OpenRun]) -> dict[str, Any]:
    """Describe runs beside each other, with the settings in which they differ."""
    flat = [dict(_settings(each.run)) for each in opened]
    names = list(dict.fromkeys(name for each in flat for name in each))
    rows = [{"name": name, "values": [each.get(name) for each in flat]} for name in names]
    differing = [row for row in rows if len({repr(value) for value in row["values"]}) > 1]
    return {
        "runs": [_describe(each) for each in opened],
        "settings": {"differing": differing[:_MOST_SETTINGS], "same": len(rows) - len(differing)},
        "scalars": _common_scalars(opened),
    }


def _describe(opened: OpenRun) -> dict[str, Any]:
    row = read_row(opened.run, opened.name)
    return {
        "id": opened.id,
        "name": opened.name,
        "facts": asdict(facts_of(opened.run)) | {"status": opened.status},
        "findings": [each.kind for each in row.troubles],
        "severity": row.severity,
        "judged": row.judged,
    }


def _settings(run: Run) -> Iterator[tuple[str, Any]]:
    yield from settings_of(run).items()
    told = {"pid", "seed"}  # each process has its own, and the seed is among the settings
    yield from flatten("environment", {name: each for name, each in run.header.environment.items() if name not in told})


def _common_scalars(opened: list[OpenRun]) -> list[str]:
    """Return the scalars that at least two runs have (or the one that there is), those of most runs first."""
    seen: dict[str, int] = {}
    for each in opened:
        for site in each.run.sites:
            if site.quantity == "scalar":
                seen[site.key] = seen.get(site.key, 0) + 1
    least = min(2, len(opened))
    return sorted((key for key, times in seen.items() if times >= least), key=lambda key: -seen[key])


def _partings(opened: list[OpenRun]) -> dict[str, Any]:
    """Compare the first run with each of the next few."""
    first, others = opened[0], opened[1:_MOST_PARTED]
    return {
        "of": first.name,
        "partings": [parting(first, other) for other in others],
        "left_out": len(opened) - 1 - len(others),
    }


def parting(first: OpenRun, other: OpenRun) -> dict[str, Any]:
    """Describe where two runs first differ, at all and by more than the tolerance."""
    exact = divergence(first.run, other.run)
    apart = divergence(first.run, other.run, tolerance=_APART) if exact.first else exact
    return {
        "run": other.id,
        "name": other.name,
        "exact": _to_json(exact),
        "apart": _to_json(apart),
        "tolerance": _APART,
    }


def _to_json(found: Divergence) -> dict[str, Any]:
    return {
        "first": found.first,
        "together": found.together[:_MOST_TOGETHER],
        "count": len(found.together),
        "steps": found.steps,
        "sites": found.sites,
        "complete": found.complete,
    }


def compare_layers(opened: list[OpenRun], by: Sequence[str] = ()) -> dict[str, Any]:
    """Describe how layers differ between runs, or between groups of them, the clearest difference first."""
    runs, groups = _by_name(opened), _grouped(opened, by)
    together = [[runs[row.name] for row in group.rows] for group in groups] or [[run] for run in runs.values()]
    rows = layers_apart(together)
    return {
        "names": [group.name for group in groups] or list(runs),
        "total": len(rows),
        "rows": [asdict(row) for row in rows[:_MOST_LAYERS]],
    }
