"""Figures of one run, as Plotly draws them. The page writes titles itself, so they travel beside the figure."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from starlette.routing import Route

from sonde.analysis import events_of
from sonde.errors import SelectionError
from sonde.records import QUANTITIES
from sonde.store import Run
from sonde.views import figures
from sonde.views.figures.theme import captions
from sonde.views.web.answers import Query, plain_route, run_route
from sonde.views.web.library import Library, OpenRun
from sonde.views.web.run_api import checkpoints_of

Maker = Callable[[Run, Query], Any]


def routes(library: Library) -> list[Route]:
    """Return the routes of figures."""
    return [
        run_route(library, "figure/{name}", _figure),
        plain_route("themes", lambda query: {theme: _template(theme) for theme in figures.THEMES}),
    ]


def _template(theme: figures.Theme) -> Any:
    made = figures.template(theme).to_plotly_json()
    # The page's own colours shine through.
    made["layout"] |= {"paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)"}
    return made


def _figure(opened: OpenRun, query: Query) -> bytes:
    maker = FIGURES.get(query.path["name"])
    if maker is None:
        raise SelectionError(f"There is no figure {query.path['name']!r:.60}. There are: {', '.join(FIGURES)}.")
    return pack(maker(opened.run, query))


def pack(figure: Any) -> bytes:
    """Return a figure as JSON: its title and note as plain text, its traces, and its layout without a theme."""
    texts = captions(figure)
    about = {"title": texts.title, "note": texts.note, "empty": bool(texts.missing)}
    if texts.missing:  # words need no plot around them
        return json.dumps(about | {"missing": texts.missing}, allow_nan=False).encode()
    figure.layout.title = figure.layout.template = figure.layout.meta = None
    body = json.loads(figure.to_json())
    body["layout"].pop("template", None)
    return json.dumps(about | body, allow_nan=False).encode()


def _tree(run: Run, query: Query) -> Any:
    colour = query.choice("colour", ("statistic", "findings"))
    quantity = query.choice("quantity", ("gradient", *QUANTITIES))
    return figures.model_tree(
        run,
        colour="findings" if colour == "findings" else "statistic",
        quantity=quantity,
        stat=query.text("stat", "rms"),
        step=query.number("step"),
    )


def _timeline(run: Run, query: Query) -> Any:
    findings = [*run.findings, *run.closed_findings]
    return figures.event_timeline([*events_of(run), *checkpoints_of(run)], findings=findings)


def _histogram(run: Run, query: Query) -> Any:
    kind: Any = query.choice("kind", ("heat", "ridge", "signed", "values"))
    return figures.histogram_over_time(run, query.text("site"), kind=kind)


FIGURES: Final[dict[str, Maker]] = {
    "histogram": _histogram,
    "flow": lambda run, query: figures.gradient_flow(run, step=query.number("step"), stat=query.text("stat", "rms")),
    "tree": _tree,
    "phases": lambda run, query: figures.step_phases(run),
    "memory": lambda run, query: figures.memory_timeline(run),
    "timeline": _timeline,
    "ranks": lambda run, query: figures.rank_heatmap(run, query.text("what", "own")),
    "rank-phases": lambda run, query: figures.rank_phases(run),
    "rank-spread": lambda run, query: figures.rank_spread(run, query.text("site"), query.text("stat")),
}
