"""The training loop itself: where the time of a step goes, and how much memory it takes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from sonde import vitals
from sonde.analysis import column_edges
from sonde.records import Site
from sonde.store import Run
from sonde.views.figures.curves import MOST_COLUMNS, Line, as_lines, read_lines
from sonde.views.figures.library import Figure, graph_objects
from sonde.views.figures.lines import add_line
from sonde.views.figures.theme import AMBER, BLUE, COLOURS, GREEN, GREY, PINK, Theme, empty, finish
from sonde.views.figures.words import safe

_MEMORY: Final = re.compile(r"memory|allocated|reserved|\brss\b", re.IGNORECASE)
_PHASE_COLOURS: Final = {"data wait": AMBER, "forward": BLUE, "backward": PINK, "optimizer": GREEN, "other": GREY}


def step_phases(source: Run | Mapping[str, Any], *, theme: Theme = "light") -> Figure:
    """Draw where the time of each step goes: waiting for data, forward, backward, optimizer, the rest.

    Args:
        source: A run; or by phase the seconds of each step, or `(steps, seconds)`.
        theme: `light` or `dark`.

    """
    title = "Where the time of a step goes"
    lines = _read_phases(source) if isinstance(source, Run) else as_lines(source)
    lines = [line for line in lines if line.known]
    if not lines:
        return empty(title, "The run has no times of the phases of a step.", theme=theme)
    first, last = min(int(line.steps[0]) for line in lines), max(int(line.steps[-1]) for line in lines)
    edges = column_edges(first, last, MOST_COLUMNS)
    at = np.ceil(edges[:-1])
    figure = graph_objects().Figure()
    totals = {}
    for index, line in enumerate(lines):
        # The mean, not the extreme: phases are stacked, and only means add up to the mean of the whole.
        seconds = _means(line, edges)
        totals[line.name] = float(np.nanmean(line.values[np.isfinite(line.values)]))
        colour = _PHASE_COLOURS.get(line.name, COLOURS[index % len(COLOURS)])
        figure.add_trace(
            graph_objects().Scatter(
                x=at, y=np.nan_to_num(seconds) * 1e3, name=safe(line.name), stackgroup="phases", mode="lines",
                line={"width": 0.5, "color": colour},
                hovertemplate=f"{safe(line.name)}<br>step %{{x:,}}: %{{y:.3g}} ms<extra></extra>",
            )
        )  # fmt: skip
    whole = sum(totals.values())
    shares = ", ".join(f"{name} {value / whole:.0%}" for name, value in totals.items()) if whole > 0 else ""
    axes = {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"title": {"text": "milliseconds per step"}, "rangemode": "tozero"},
    }
    return finish(figure, title, f"mean {whole * 1e3:.3g} ms: {shares}", theme=theme, **axes)


def _means(line: Line, edges: Any) -> Any:
    finite = np.isfinite(line.values)
    places = np.clip(np.searchsorted(edges, line.steps[finite], side="right") - 1, 0, len(edges) - 2)
    total = np.bincount(places, weights=line.values[finite], minlength=len(edges) - 1)
    count = np.bincount(places, minlength=len(edges) - 1)
    return np.divide(total, count, out=np.full(len(total), np.nan), where=count > 0)


def _read_phases(run: Run) -> list[Line]:
    wanted = {vitals.DATA_WAIT: "data wait"} | {vitals.time_of(phase): phase for phase in vitals.PHASE_TIMES}
    lines = []
    for part, name in wanted.items():
        site = _vital(run, part)
        if site is not None:
            lines += [Line(name, line.steps, line.values, line.bad) for line in read_lines(run, [site], "mean")]
    return lines


def _vital(run: Run, name: str) -> Site | None:
    part = vitals.part_of(name)
    found = (site for site in run.sites if (site.name, site.quantity, site.part) == (vitals.LOOP, "vital", part))
    return next(found, None)


def memory_timeline(source: Run | Mapping[str, Any], *, theme: Theme = "light") -> Figure:
    """Draw how much memory the training takes.

    Args:
        source: A run that recorded memory; or by name the bytes at each step, or `(steps, bytes)`.
        theme: `light` or `dark`.

    """
    title = "Memory"
    lines = _read_memory(source) if isinstance(source, Run) else as_lines(source, "memory")
    lines = [line for line in lines if line.known]
    if not lines:
        return empty(
            title, "The run has recorded no memory; session.log(memory_allocated=...) adds a curve.", theme=theme
        )
    peak = max(float(np.nanmax(line.values[np.isfinite(line.values)])) for line in lines)
    factor, unit = _unit(peak)
    figure = graph_objects().Figure()
    for index, line in enumerate(lines):
        scaled = Line(line.name, line.steps, line.values / factor, line.bad)
        add_line(figure, scaled, COLOURS[index % len(COLOURS)], fill="tozeroy" if len(lines) == 1 else None)
    axes = {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": unit}, "rangemode": "tozero"}}
    return finish(figure, title, f"peak {peak / factor:.3g} {unit}", theme=theme, showlegend=len(lines) > 1, **axes)


def _read_memory(run: Run) -> list[Line]:
    sites: Sequence[Site] = [
        site for site in run.sites if site.quantity in ("scalar", "vital") and _MEMORY.search(site.name + site.part)
    ]
    lines = read_lines(run, sites, "mean")
    return [
        Line(line.name.replace(":scalar", "").replace(":vital", ""), line.steps, line.values, line.bad)
        for line in lines
    ]


def _unit(nbytes: float) -> tuple[float, str]:
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= factor:
            return factor, unit
    return 1.0, "bytes"
