"""Draw the outputs of layers: how large, how sparse, and which units."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from sonde.analysis import ModelOrder, Values
from sonde.core import signals
from sonde.errors import OptionError
from sonde.records import Site
from sonde.store import Run
from sonde.views.figures.curves import Grid, as_grid, as_values, read_lines
from sonde.views.figures.heatmaps import heat_trace, row_axis, row_height
from sonde.views.figures.theme import DIVERGING, SEQUENTIAL, Figure, Theme, empty, finish, graph_objects, subplots

_MOST_CELLS: Final = 400
_MOST_MARKS: Final = 2000


def activation_patterns(
    source: Run | Any, pattern: str = "*:output", *, name: str = "", theme: Theme = "light"
) -> Figure:
    """Draw what layers put out.

    Args:
        source: A run; or activations [samples or steps, units], whose further dimensions are flattened into units.
        pattern: Which outputs of the run.
        name: What to call the activations.
        theme: `light` or `dark`.

    """
    if isinstance(source, Run):
        return _of_run(source, pattern, theme)
    return _of_values(as_values(source), name or "activations", theme)


def input_output(inputs: Any, outputs: Any, *, name: str = "", theme: Theme = "light") -> Figure:
    """Draw the outputs of a layer over its inputs, element by element.

    Args:
        inputs: The elements that went in.
        outputs: The elements that came out, in the same order.
        name: What to call the layer.
        theme: `light` or `dark`.

    """
    x, y = as_values(inputs).reshape(-1), as_values(outputs).reshape(-1)
    if len(x) != len(y):
        raise OptionError(f"There are {len(x)} inputs and {len(y)} outputs; they must be as many.")
    title = f"Output over input of {name or 'a layer'}"
    known = np.isfinite(x) & np.isfinite(y)
    if not known.any():
        return empty(title, "There is no pair of finite numbers.", theme=theme)
    x, y = x[known], y[known]
    stride = max(1, len(x) // _MOST_MARKS)
    figure = graph_objects().Figure(
        graph_objects().Scatter(x=x[::stride], y=y[::stride], mode="markers", marker={"size": 5, "opacity": 0.6})
    )
    note = f"{len(x):,} elements" + (f", one in {stride} drawn" if stride > 1 else "")
    note += f", {len(known) - len(x):,} not finite left out" if len(x) < len(known) else ""
    return finish(
        figure, title, note, theme=theme, xaxis={"title": {"text": "input"}}, yaxis={"title": {"text": "output"}}
    )


def _of_run(run: Run, pattern: str, theme: Theme) -> Figure:
    title = "Activations, layer by layer"
    if not any(site.quantity == "output" for site in run.sites):
        return empty(title, "The run has no outputs; record with what='outputs'.", theme=theme)
    order = ModelOrder(run.header, run.sites)
    sites = [site for site in run.find(pattern) if _is_activation(site)]
    sites = sorted(sites, key=order.of_site)
    grids = [(stat, as_grid(read_lines(run, sites, stat), log=stat == "rms")) for stat in ("rms", "zero_share")]
    if not grids[0][1].values.size:
        return empty(title, "None of these outputs has a reading.", theme=theme)
    titles = ("rms (logarithmic colour)", "share of exact zeros")
    figure = subplots().make_subplots(rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.13, subplot_titles=titles)
    for column, (stat, grid) in enumerate(grids, 1):
        named = Grid([key.replace(":output", "") for key in grid.names], grid.steps, grid.values, grid.bad)
        limits: dict[str, Any] = {"zmin": 0.0, "zmax": 1.0} if stat == "zero_share" else {}
        bar = {"x": 0.44 if column == 1 else 1.0} | ({"tickformat": ".0%"} if stat == "zero_share" else {})
        figure.add_trace(heat_trace(named, stat == "rms", colorbar=bar, **limits), row=1, col=column)
        figure.update_yaxes(**row_axis(named.names), row=1, col=column)
        figure.update_xaxes(title={"text": "step"}, row=1, col=column)
    return finish(figure, title, "a layer that is all zeros is dead", theme=theme, height=row_height(len(sites)) + 30)


def _is_activation(site: Site) -> bool:
    usual = site.quantity == "output" and site.phase == "train" and site.same_as is None
    return usual and site.name != signals.LOSS


def _of_values(values: Values, name: str, theme: Theme) -> Figure:
    title = f"Activation patterns of {name}"
    if values.ndim == 0:
        raise OptionError("Activations need at least one dimension; got a single number.")
    grid = values.reshape(1, -1) if values.ndim == 1 else values.reshape(len(values), -1)
    if not grid.size or not np.isfinite(grid).any():
        return empty(title, "There is no finite activation.", theme=theme)
    shown = _strongest(grid)
    known = shown[np.isfinite(shown)]
    signed = bool(known.min() < 0)
    limit = float(np.abs(known).max()) or 1.0
    colour = {"colorscale": DIVERGING, "zmin": -limit, "zmax": limit} if signed else {"colorscale": SEQUENTIAL}
    figure = graph_objects().Figure(
        graph_objects().Heatmap(
            z=np.where(np.isfinite(shown), shown, np.nan).astype(np.float32),
            colorbar={"thickness": 12, "outlinewidth": 0},
            hovertemplate="row %{y}, unit %{x}: %{z:.4g}<extra></extra>",
            **colour,
        )
    )
    zeros, dead = float((grid == 0).mean()), int((grid == 0).all(axis=0).sum())
    note = f"{grid.shape[0]:,} rows of {grid.shape[1]:,} units, {zeros:.1%} zeros, {dead:,} units never active"
    note += "; each cell shows the strongest of those it covers" if shown.shape != grid.shape else ""
    axes = {"xaxis": {"title": {"text": "unit"}}, "yaxis": {"title": {"text": "row"}, "autorange": "reversed"}}
    return finish(figure, title, note, theme=theme, **axes)


def _strongest(grid: Values) -> Values:
    """Make a large grid smaller: each cell becomes the strongest of those it covers."""
    for axis in (0, 1):
        length = grid.shape[axis]
        if length > _MOST_CELLS:
            cuts = np.linspace(0, length, _MOST_CELLS + 1).astype(int)[:-1]
            finite = np.where(np.isfinite(grid), grid, 0.0)
            high = np.maximum.reduceat(finite, cuts, axis=axis)
            low = np.minimum.reduceat(finite, cuts, axis=axis)
            grid = np.where(np.abs(low) > np.abs(high), low, high)
    return grid
