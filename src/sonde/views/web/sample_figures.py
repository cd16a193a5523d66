"""Scores over epochs as a figure: a line a run, and for repeats their mean with a band of one deviation."""

from __future__ import annotations

from typing import Any, Final

from sonde.views.figures.library import graph_objects
from sonde.views.figures.theme import empty, finish
from sonde.views.figures.words import safe

_BAND: Final = "rgba(120, 140, 160, 0.25)"


def draw_scores(lines: list[dict[str, Any]], groups: list[dict[str, Any]], metric: str) -> Any:
    """Draw the lines and groups that `aggregated` returns."""
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
