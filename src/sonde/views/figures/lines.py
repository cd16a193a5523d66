"""Curves over steps, drawn alike in all figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from sonde.views.figures.curves import Line
from sonde.views.figures.library import Figure, graph_objects
from sonde.views.figures.theme import BAD, COLOURS, linear_axis, log_axis
from sonde.views.figures.words import cut, safe

_FEW: Final = 20  # so few points are shown as points
_FEW_STEPS: Final = 8


def draw_lines(lines: Sequence[Line], y_title: str, *, log: bool = False, colours: Sequence[str] = COLOURS) -> Figure:
    """Return a figure with the curves, and crosses at the steps where something was not finite."""
    figure = graph_objects().Figure()
    for index, line in enumerate(lines):
        add_line(figure, line, colours[index % len(colours)], log=log)
    add_crosses(figure, lines)
    figure.update_xaxes(**step_axis(lines))
    everything = np.concatenate([line.values for line in lines]) if lines else np.empty(0)
    figure.update_yaxes(title={"text": y_title}, **(log_axis if log else linear_axis)(everything))
    # A long legend gets room of its own, so that the plot keeps its height.
    height = 400 + 16 * max(0, -(-len(lines) // 3) - 2)
    figure.update_layout(hovermode="closest", showlegend=len(lines) > 1, height=height)
    return figure


def step_axis(lines: Sequence[Line], title: str = "step") -> dict[str, Any]:
    """Return an axis over steps; where there are few it counts them one by one, since there is no half a step."""
    ends = [end for line in lines if len(line.steps) for end in (int(line.steps[0]), int(line.steps[-1]))]
    few = bool(ends) and max(ends) - min(ends) <= _FEW_STEPS
    return {"title": {"text": title}} | ({"dtick": 1} if few else {})


def add_line(
    figure: Figure,
    line: Line,
    colour: str,
    *,
    log: bool = False,
    name: str | None = None,
    where: Any = None,
    over: str = "step",
    **style: Any,
) -> None:
    """Add one curve, thinned so that its extremes survive; on a log scale what is not positive is a gap."""
    drawn = line.thinned()
    values = np.where(np.isfinite(drawn.values), drawn.values, np.nan)
    if log:
        values = np.where(values > 0, values, np.nan)
    few = np.isfinite(values).sum() <= _FEW
    trace = graph_objects().Scatter(
        x=drawn.steps,
        y=values,
        mode="lines+markers" if few else "lines",
        name=safe(cut(line.name, 40)) if name is None else name,
        line={"color": colour, "width": style.pop("width", 1.8)},
        marker={"color": colour, "size": 6},
        hovertemplate=f"{safe(line.name)}<br>{over} %{{x:,}}: %{{y:.4g}}<extra></extra>",
        **style,
    )
    figure.add_trace(trace, **({} if where is None else {"row": where, "col": 1}))


def add_crosses(figure: Figure, lines: Sequence[Line], *, where: Any = None, most: int = 200) -> None:
    """Mark steps with NaN or infinity by crosses at the foot of the plot."""
    steps = sorted({int(step) for line in lines for step in line.bad_steps[:most]})[:most]
    if not steps:
        return
    known = [line.values[np.isfinite(line.values) & (line.values > 0)] for line in lines]
    everything = np.concatenate(known) if known else np.empty(0)
    low = float(everything.min()) if len(everything) else 1.0
    trace = graph_objects().Scatter(
        x=steps,
        y=[low] * len(steps),
        mode="markers",
        name="NaN or infinite",
        showlegend=all(trace.name != "NaN or infinite" for trace in figure.data),
        marker={"symbol": "x", "size": 9, "color": BAD},
        hovertemplate="step %{x:,}: NaN or infinite<extra></extra>",
    )
    figure.add_trace(trace, **({} if where is None else {"row": where, "col": 1}))
