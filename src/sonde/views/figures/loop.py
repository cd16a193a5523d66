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
from sonde.views.figures.lines import add_line, step_axis
from sonde.views.figures.theme import AMBER, BLUE, COLOURS, GREEN, GREY, ORANGE, PINK, PURPLE, SKY, Theme, empty, finish
from sonde.views.figures.words import safe

MEMORY: Final = re.compile(r"memory|allocated|reserved|\brss\b", re.IGNORECASE)
_PHASE_COLOURS: Final = {
    "data wait": AMBER,
    "to device": PURPLE,
    "forward": BLUE,
    "backward": PINK,
    "optimizer": GREEN,
    "evaluation": SKY,
    "watching": ORANGE,
    "other": GREY,
}


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
    steps = np.unique(np.concatenate([line.steps for line in lines]))
    edges = column_edges(int(steps[0]), int(steps[-1]), MOST_COLUMNS)
    # Means, not extremes: phases are stacked, and only means add up to the mean of the whole. A phase that did not
    # occur in a step took no time in it.
    heights = {line.name: _means(line, steps, edges) * 1e3 for line in lines}
    means = {line.name: float(np.nansum(line.values)) / len(steps) for line in lines}
    whole = sum(means.values())
    figure = graph_objects().Figure()
    for index, (name, height) in enumerate(heights.items()):
        colour = _PHASE_COLOURS.get(name, COLOURS[index % len(COLOURS)])
        figure.add_trace(
            graph_objects().Scatter(
                x=np.ceil(edges[:-1]),
                y=height,
                name=f"{safe(name)} {means[name] / whole:.0%}" if whole > 0 else safe(name),
                stackgroup="phases",
                mode="lines",
                line={"width": 0.5, "color": colour},
                hovertemplate=f"{safe(name)}<br>step %{{x:,}}: %{{y:.3g}} ms<extra></extra>",
            )
        )
    top, beyond = _top(np.nansum(list(heights.values()), axis=0))
    note = f"mean {whole * 1e3:.3g} ms{beyond}"
    y_axis = {"title": {"text": "milliseconds per step"}, "range": [0, top]}
    return finish(figure, title, note, theme=theme, xaxis=step_axis(lines), yaxis=y_axis)


def _top(totals: Any) -> tuple[float, str]:
    """Return where the axis ends: a step that is far slower than all others, as the first often is, is cut off."""
    usual, highest = float(np.quantile(totals, 0.98)), float(totals.max())
    if highest <= 2 * usual:
        return 1.08 * highest or 1.0, ""
    return 1.25 * usual, f"; cut off: up to {highest:.3g} ms"


def _means(line: Line, steps: Any, edges: Any) -> Any:
    finite = np.isfinite(line.values)
    total = np.bincount(_places(line.steps[finite], edges), weights=line.values[finite], minlength=len(edges) - 1)
    count = np.bincount(_places(steps, edges), minlength=len(edges) - 1)
    return np.divide(total, count, out=np.full(len(total), np.nan), where=count > 0)


def _places(steps: Any, edges: Any) -> Any:
    return np.clip(np.searchsorted(edges, steps, side="right") - 1, 0, len(edges) - 2)


def _read_phases(run: Run) -> list[Line]:
    wanted = {vitals.DATA_WAIT: "data wait"} | {
        vitals.time_of(phase): phase.replace("_", " ") for phase in vitals.PHASE_TIMES
    }
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
    axes = {"xaxis": step_axis(lines), "yaxis": {"title": {"text": unit}, "rangemode": "tozero"}}
    return finish(figure, title, f"peak {peak / factor:.3g} {unit}", theme=theme, showlegend=len(lines) > 1, **axes)


def _read_memory(run: Run) -> list[Line]:
    sites: Sequence[Site] = [
        site for site in run.sites if site.quantity in ("scalar", "vital") and MEMORY.search(site.name + site.part)
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
