"""How far each layer moves in a step, relative to its size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sonde.analysis import ModelOrder
from sonde.store import Run
from sonde.views.figures.curves import Line, as_lines, read_lines, spread
from sonde.views.figures.library import Figure
from sonde.views.figures.lines import draw_lines
from sonde.views.figures.theme import GREEN, Theme, colour_scale, empty, finish

_USUAL: Final = (1e-4, 1e-2)


def update_ratio(source: Run | Mapping[str, Any], *, most: int = 24, theme: Theme = "light") -> Figure:
    """Draw the norm of each update over the norm of its parameter; about a thousandth is usual.

    Args:
        source: A run; or for each parameter its ratios, or `(steps, ratios)`.
        most: Draw at most so many parameters: matrices first, evenly spread over the depth.
        theme: `light` or `dark`.

    """
    title = "Size of updates, relative to the parameters"
    every = _read(source) if isinstance(source, Run) else as_lines(source)
    every = [line for line in every if len(line.steps)]
    if not every:
        return empty(title, "The run has no updates and parameters; record with what='updates'.", theme=theme)
    lines = spread(every, most)
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


def _read(run: Run) -> list[Line]:
    order = ModelOrder(run.header, run.sites)
    keys = {site.key for site in run.sites}
    sites = [site for site in run.sites if site.quantity == "update" and f"{site.name}:parameter" in keys]
    matrices = [site for site in sites if len(site.shape) > 1]
    lines = read_lines(run, sorted(matrices or sites, key=order.of_site), "ratio")
    return [Line(line.name.rpartition(":")[0], line.steps, line.values, line.bad) for line in lines]
