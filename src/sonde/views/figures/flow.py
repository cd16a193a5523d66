"""Draw gradient sizes and relative updates from the first layer to the last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from sonde.analysis import ModelOrder, layer_of
from sonde.analysis.downsample import spaced
from sonde.errors import OptionError
from sonde.records import Site
from sonde.store import Run
from sonde.views.figures.curves import Line, as_lines, as_values, draw_lines, read_lines, span_of_readings
from sonde.views.figures.theme import (
    BAD,
    BLUE,
    GREEN,
    ORANGE,
    Figure,
    Theme,
    colour_scale,
    empty,
    finish,
    graph_objects,
    labels,
    log_axis,
    safe,
    stat_title,
)

# --------------------------------------------------------------------------------
# How large gradients are from the first layer to the last: at a step, and over time.


_RECENT: Final = 20
_FOOT: Final = 0.04
_MOST_TICKS: Final = 26  # with names that do not overlap
_MISSING: Final = "The run has no gradients; record with what='gradients'."


def gradient_flow(
    source: Run | Mapping[str, Any], *, step: int | None = None, stat: str = "rms", theme: Theme = "light"
) -> Figure:
    """Draw the gradient of each layer over depth.

    Args:
        source: A run; or for each layer a number, or several of which the median is drawn.
        step: At which step of the run; by default the median of the last steps.
        stat: Which statistic of the gradients.
        theme: `light` or `dark`.

    """
    title = "Gradient flow, first layer to last"
    note = f"median of the last {_RECENT} readings" if step is None else f"step {step:,}"
    if isinstance(source, Run):
        lines = _read(source, stat, step)
        flow = {line.name: line for line in lines}
    else:
        flow = {str(name): Line.of(str(name), *_counted(given)) for name, given in _given(source).items()}
        note = "median of the values of each layer"
    if not flow:
        return empty(title, _MISSING, theme=theme)
    names = list(flow)
    values = np.array([_recent(line) for line in flow.values()])
    bad = np.array([bool(line.bad[-_RECENT:].any()) for line in flow.values()])
    return finish(_depth(names, values, bad, stat), title, note, theme=theme)


def _counted(given: Any) -> tuple[Any, Any]:
    values = as_values(given).reshape(-1)
    return np.arange(len(values)), values


def _read(run: Run, stat: str, step: int | None) -> list[Line]:
    sites = gradient_sites(run)
    start, stop = span_of_readings(run, sites, step, _RECENT)
    return _by_layer(run, read_lines(run, sites, stat, start=start, stop=stop))


def _by_layer(run: Run, lines: list[Line]) -> list[Line]:
    """Name curves after their layers; where a layer has several, after their parameters."""
    layers = [layer_of(run.site(line.name)) for line in lines]
    names = [
        layer if layer and layers.count(layer) == 1 else line.name.rpartition(":")[0]
        for layer, line in zip(layers, lines, strict=True)
    ]
    return [Line(name, line.steps, line.values, line.bad) for name, line in zip(names, lines, strict=True)]


def gradient_sites(run: Run) -> list[Site]:
    """Return one gradient per layer, of its matrices where there are any, in model order."""
    order = ModelOrder(run.header, run.sites)
    sites = [site for site in run.sites if site.quantity == "gradient" and site.same_as is None]
    matrices = [site for site in sites if len(site.shape) > 1]
    return sorted(matrices or sites, key=order.of_site)


def _recent(line: Line) -> float:
    known = line.values[-_RECENT:]
    known = known[np.isfinite(known)]
    return float(np.median(known)) if len(known) else float("nan")


def _depth(names: list[str], values: Any, bad: Any, stat: str) -> Figure:
    go, at = graph_objects(), np.arange(len(names))
    positive = np.isfinite(values) & (values > 0)
    full = [safe(name) for name in names]
    figure = go.Figure(
        go.Scatter(
            x=at[positive], y=values[positive], mode="lines+markers", name=safe(stat_title(stat, "gradient")),
            line={"color": BLUE, "width": 2}, marker={"size": 7}, text=[full[i] for i in at[positive]],
            hovertemplate="%{text}<br>%{y:.3g}<extra></extra>", showlegend=False,
        )
    )  # fmt: skip
    for flags, name, symbol, colour in (
        (np.isfinite(values) & (values == 0), "exactly zero", "triangle-down", ORANGE),
        (bad | ~np.isfinite(values), "NaN or infinite", "x", BAD),
    ):
        if flags.any():
            # They have no place on the scale of the others, so they are drawn at the bottom, without axis numbers.
            figure.add_trace(
                go.Scatter(
                    x=at[flags], y=[_FOOT] * int(flags.sum()), mode="markers", name=name, yaxis="y2",
                    text=[full[i] for i in at[flags]], marker={"size": 12, "symbol": symbol, "color": colour},
                    hovertemplate=f"%{{text}}<br>{name}<extra></extra>",
                )
            )  # fmt: skip
            figure.update_layout(yaxis2={"overlaying": "y", "range": [0, 1], "visible": False})
    ticks = at[:: -(-len(at) // _MOST_TICKS)]
    shown = labels(names, 24)
    axis = {"tickvals": ticks, "ticktext": [shown[i] for i in ticks], "tickangle": -40 if len(at) > 6 else None}
    axis["autotickangles"] = [0, -40]  # a few names lie flat where the window is wide enough
    figure.update_layout(xaxis=axis, height=440)
    figure.update_yaxes(title={"text": safe(stat_title(stat, "gradient"))}, **log_axis(values[positive]))
    return figure


def _given(source: Any) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    as_values(source)  # raises with what a path would need
    raise OptionError("gradient_flow takes a run, or values by layer: {'layer': 0.1}.")


def gradient_flow_over_time(
    source: Run | Mapping[str, Any], *, stat: str = "rms", most: int = 24, theme: Theme = "light"
) -> Figure:
    """Draw the gradient of each layer over the steps, coloured from the first layer (dark) to the last (bright).

    Args:
        source: A run; or for each layer its values, or `(steps, values)`.
        stat: Which statistic of the gradients.
        most: Draw at most so many layers, evenly spread over the depth.
        theme: `light` or `dark`.

    """
    title = "Gradients over time"
    if isinstance(source, Run):
        lines = _by_layer(source, read_lines(source, spaced(gradient_sites(source), most), stat))
        total = len(gradient_sites(source))
    else:
        every = as_lines(source)
        lines, total = spaced(every, most), len(every)
    lines = [line for line in lines if len(line.steps)]
    if not lines:
        return empty(title, _MISSING, theme=theme)
    note = f"{len(lines)} of {total} layers" if total > len(lines) else "first layer dark, last layer bright"
    if len(lines) == 1:
        title, note = f"Gradient of {lines[0].name} over time", ""
    # Plain values come without the name of their statistic.
    axis = safe(stat_title(stat, "gradient")) if isinstance(source, Run) else "gradient"
    return finish(draw_lines(lines, axis, log=True, colours=colour_scale(len(lines))), title, note, theme=theme)


# --------------------------------------------------------------------------------
# How far each layer moves in a step, relative to its size.


_USUAL: Final = (1e-4, 1e-2)


def update_ratio(source: Run | Mapping[str, Any], *, most: int = 24, theme: Theme = "light") -> Figure:
    """Draw the norm of each update over the norm of its parameter; about a thousandth is usual.

    Args:
        source: A run; or for each parameter its ratios, or `(steps, ratios)`.
        most: Draw at most so many parameters: matrices first, evenly spread over the depth.
        theme: `light` or `dark`.

    """
    title = "Size of updates, relative to the parameters"
    every = _ratios_read(source) if isinstance(source, Run) else as_lines(source)
    every = [line for line in every if len(line.steps)]
    if not every:
        return empty(title, "The run has no updates and parameters; record with what='updates'.", theme=theme)
    lines = spaced(every, most)
    figure = draw_lines(lines, "norm of update / norm of parameter", log=True, colours=colour_scale(len(lines)))
    figure.add_hrect(y0=_USUAL[0], y1=_USUAL[1], fillcolor=GREEN, opacity=0.08, line_width=0, layer="below")
    figure.add_hline(y=1e-3, line={"color": GREEN, "dash": "dot", "width": 1})
    few = f", {len(lines)} of {len(every)} parameters" if len(lines) < len(every) else ""
    return finish(
        figure,
        title,
        f"first layer dark, last bright; shaded: 10⁻⁴ to 10⁻², where most trainings live{few}",
        theme=theme,
    )


def _ratios_read(run: Run) -> list[Line]:
    order = ModelOrder(run.header, run.sites)
    keys = {site.key for site in run.sites}
    sites = [site for site in run.sites if site.quantity == "update" and f"{site.name}:parameter" in keys]
    matrices = [site for site in sites if len(site.shape) > 1]
    lines = read_lines(run, sorted(matrices or sites, key=order.of_site), "ratio")
    return [Line(line.name.rpartition(":")[0], line.steps, line.values, line.bad) for line in lines]
