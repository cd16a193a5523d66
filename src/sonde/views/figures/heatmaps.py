"""Draw all layers over all steps as one heat map, for any statistic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from sonde.analysis import ModelOrder, Values
from sonde.analysis.downsample import spaced
from sonde.core import statistics
from sonde.errors import OptionError
from sonde.store import Run
from sonde.views.figures.curves import Grid, as_grid, as_lines, as_values, read_lines, wants_log
from sonde.views.figures.theme import (
    BAD,
    SEQUENTIAL,
    Figure,
    Theme,
    as_title,
    empty,
    finish,
    graph_objects,
    labels,
    power,
    safe,
    stat_title,
)

_MOST_CROSSES: Final = 2000
_MOST_ROWS: Final = 400  # as many as a screen can show apart
_TAIL: Final = 0.005
_FEW_STEPS: Final = 10


def layer_heatmap(
    source: Run | Mapping[str, Any] | Any,
    pattern: str = "*:gradient",
    *,
    stat: str | None = None,
    names: Sequence[str] | None = None,
    steps: Sequence[int] | None = None,
    log: bool | None = None,
    title: str = "Layers over steps",
    theme: Theme = "light",
) -> Figure:
    """Draw layers by steps, the colour being a statistic; magnitudes are coloured by their logarithm.

    Args:
        source: A run; for each layer its values or `(steps, values)`; or a matrix of layers by steps.
        pattern: Which sites of the run: a key, a glob, or `re:` and a regular expression.
        stat: Which statistic of the run; by default `ratio` for updates and `rms` for all else.
        names: Names of the rows of a matrix.
        steps: Steps of the columns of a matrix.
        log: Colour by the logarithm; by default where the statistic is a magnitude, or where plain values are
            positive and far apart.
        title: The title of a figure of plain values; a figure of a run has a title already.
        theme: `light` or `dark`.

    """
    if isinstance(source, Run):
        return _of_run(source, pattern, stat, log, theme)
    if isinstance(source, Mapping):
        lines = as_lines(source)
        log = _far_apart(np.concatenate([line.values for line in lines])) if lines and log is None else bool(log)
        grid = as_grid(lines, log=log)
    else:
        grid = _of_matrix(as_values(source), names, steps)
        log = _far_apart(grid.values) if log is None else log
    return _draw(grid, title, "", log, theme)


def _far_apart(values: Values) -> bool:
    """Return whether only decades show the differences: a few zeros among them are gaps then, many would be holes."""
    known = values[np.isfinite(values)]
    positive = known[known > 0]
    return bool(len(positive) and len(positive) >= 0.9 * len(known) and wants_log(positive))


def _of_matrix(values: Values, names: Sequence[str] | None, steps: Sequence[int] | None) -> Grid:
    if values.ndim != 2:
        raise OptionError(f"A heat map needs a matrix of rows by columns; got an array of shape {values.shape}.")
    rows = [str(name) for name in names] if names is not None else [str(i) for i in range(len(values))]
    columns = as_values(steps) if steps is not None else np.arange(values.shape[1], dtype=np.float64)
    if len(rows) != len(values) or len(columns) != values.shape[1]:
        raise OptionError(f"A matrix of shape {values.shape} has {len(rows)} names and {len(columns)} steps.")
    lines = as_lines({str(i): (columns, values[i]) for i in range(len(values))})
    grid = as_grid(lines, log=False)
    return Grid(rows, grid.steps, grid.values, grid.bad, grid.thinned)


def _of_run(run: Run, pattern: str, stat: str | None, log: bool | None, theme: Theme) -> Figure:
    known = [site for site in run.sites if site.quantity not in ("scalar", "vital")]
    if not known:
        return empty(f"{pattern} over steps", "The run has recorded no tensors.", theme=theme)
    order = ModelOrder(run.header, run.sites)
    sites = sorted((site for site in run.find(pattern) if site.quantity not in ("scalar", "vital")), key=order.of_site)
    if stat is None:
        stat = "ratio" if sites and all(site.quantity == "update" for site in sites) else "rms"
    log = statistics.find(stat).log if log is None else log
    shown = spaced(sites, _MOST_ROWS)
    grid = as_grid(read_lines(run, shown, stat), log=log)
    quantities = {site.quantity for site in sites}
    quantity = quantities.pop() if len(quantities) == 1 else ""
    names = [name.rpartition(":")[0] if quantity else name for name in grid.names]
    grid = Grid(names, grid.steps, grid.values, grid.bad, grid.thinned)
    what = stat_title(stat, quantity)
    title = f"{as_title(what)}, layer by layer"
    few = f"{len(shown):,} of {len(sites):,} sites, evenly over the depth" if len(shown) < len(sites) else ""
    return _draw(grid, title, few, log, theme)


def _draw(grid: Grid, title: str, few: str, log: bool, theme: Theme) -> Figure:
    if not grid.values.size or not (np.isfinite(grid.values).any() or grid.bad.any()):
        return empty(title, "There is nothing to draw: no reading has this statistic.", theme=theme)
    figure = graph_objects().Figure(heat_trace(grid, log))
    rows = row_names(grid.names)
    crosses = np.argwhere(grid.bad)[:_MOST_CROSSES]
    if len(crosses):
        figure.add_trace(
            graph_objects().Scatter(
                x=grid.steps[crosses[:, 1]], y=[rows[row] for row in crosses[:, 0]], mode="markers",
                name="NaN or infinite",
                marker={"symbol": "x-thin", "size": 6, "color": BAD, "line": {"color": BAD, "width": 2}},
                hovertemplate="%{y}<br>step %{x:,}: NaN or infinite<extra></extra>",
            )
        )  # fmt: skip
    whole = {"dtick": 1} if len(grid.steps) and np.ptp(grid.steps) < _FEW_STEPS else {}  # there is no step 0.5
    figure.update_layout(
        xaxis={"title": {"text": "step"}, **whole}, yaxis=row_axis(grid.names), height=row_height(len(grid.names))
    )
    notes = [few, "logarithmic colour" if log else ""]
    notes.append("each column shows the most unusual of its steps" if grid.thinned else "")
    return finish(figure, title, ", ".join(note for note in notes if note), theme=theme)


def heat_trace(grid: Grid, log: bool, **more: Any) -> Any:
    """Return the heat map of a grid; a logarithmic one has its colour bar labelled with the numbers themselves."""
    values = np.where(np.isfinite(grid.values), grid.values, np.nan)
    shown = np.log10(np.abs(values), out=np.full(values.shape, np.nan), where=np.abs(values) > 0) if log else values
    bar: dict[str, Any] = {"thickness": 12, "outlinewidth": 0}
    known = shown[np.isfinite(shown)]
    if len(known):
        # One cell that is far off must not flatten the differences of all others; it gets the last colour.
        low, high = (float(np.quantile(known, q)) for q in (_TAIL, 1 - _TAIL))
        low, high = (low, high) if high > low else (float(known.min()) - 0.5, float(known.max()) + 0.5)
        more = {"zmin": low, "zmax": high} | more
        bar |= log_ticks(low, high) if log else {}
    return graph_objects().Heatmap(
        x=grid.steps,
        y=row_names(grid.names),
        z=shown.astype(np.float32),
        customdata=values.astype(np.float32),
        colorscale=SEQUENTIAL,
        colorbar=bar | more.pop("colorbar", {}),
        hovertemplate="%{y}<br>step %{x:,}: %{customdata:.4g}<extra></extra>",
        **more,
    )


def log_ticks(low: float, high: float) -> dict[str, Any]:
    """Return the ticks of a colour bar over logarithms, labelled with the numbers themselves."""
    whole = [exponent for exponent in range(int(np.floor(low)), int(np.ceil(high)) + 1) if low <= exponent <= high]
    if len(whole) >= 2:
        whole = whole[:: max(1, len(whole) // 7)]
        return {"tickvals": whole, "ticktext": [power(10, exponent) for exponent in whole]}
    ticks = np.linspace(low, high, 4)
    return {"tickvals": ticks, "ticktext": [f"{10**tick:.2g}" for tick in ticks]}


def row_names(names: Sequence[str]) -> list[str]:
    """Return the full names of rows, safe to show and each once, as a category axis needs them."""
    seen: dict[str, int] = {}
    out = []
    for name in names:
        shown = safe(name or "(model)")
        seen[shown] = seen.get(shown, 0) + 1
        out.append(shown if seen[shown] == 1 else f"{shown} ({seen[shown]})")
    return out


def row_axis(names: Sequence[str]) -> dict[str, Any]:
    """Return an axis with the first row on top, and as many names as can be read, cut short."""
    full, shown = row_names(names), labels(names)
    ticks = range(0, len(names), max(1, len(names) // 48))
    return {
        "type": "category",
        "categoryarray": full,
        "tickvals": [full[i] for i in ticks],
        "ticktext": [shown[i] for i in ticks],
        "autorange": "reversed",
        "showgrid": False,
    }


def row_height(rows: int) -> int:
    """Return the height of a figure with this many rows."""
    return int(min(max(170 + 20 * rows, 320), 900))
