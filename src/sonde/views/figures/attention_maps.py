"""Draw attention maps of heads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from sonde.errors import OptionError
from sonde.views.figures.curves import as_values
from sonde.views.figures.theme import SEQUENTIAL, Figure, Theme, empty, finish, graph_objects, safe, subplots

_MOST_HEADS: Final = 16
_MOST_TOKENS: Final = 512


def attention(
    weights: Any,
    *,
    tokens: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    heads: Sequence[int] | None = None,
    name: str = "attention",
    theme: Theme = "light",
) -> Figure:
    """Draw attention weights: rows are queries, columns are keys, one panel a head.

    Args:
        weights: An array [queries, keys] or [heads, queries, keys]; a batch dimension of one is dropped. Also what an
            attention debugger captured of a sample, as `load_debug_outputs(folder)[sample][debugger]` returns it.
        tokens: What the queries are, and the keys too unless `keys` says otherwise.
        keys: What the keys are.
        heads: Which heads to draw; by default the first sixteen.
        name: What to call the layer.
        theme: `light` or `dark`.

    """
    weights, name = _captured(weights, name)
    values = as_values(weights)
    if values.ndim == 4 and len(values) == 1:
        values = values[0]
    if values.ndim == 2:
        values = values[None]
    if values.ndim != 3:
        raise OptionError(
            f"Attention has the shape [heads, queries, keys]; got {as_values(weights).shape}. Pick one sample."
        )
    title = f"Attention of {name}" if name != "attention" else "Attention"
    if not values.size or not np.isfinite(values).any():
        return empty(title, "There are no finite attention weights.", theme=theme)
    chosen = list(range(min(len(values), _MOST_HEADS))) if heads is None else list(heads)
    if any(not 0 <= head < len(values) for head in chosen):
        raise OptionError(f"heads={chosen} does not fit: there are heads 0 to {len(values) - 1}.")
    return _draw(values, chosen, _axes(values, tokens, keys), title, theme)


def _captured(weights: Any, name: str) -> tuple[Any, str]:
    """Return the map of a capture, and its layer's name unless there is another."""
    if not isinstance(weights, Mapping):
        return weights, name
    if "attention_map" not in weights:
        raise OptionError(
            f"This capture holds no attention_map, only {', '.join(map(str, weights))}. Pass what an AttentionDebugger "
            "captured of one sample, or an array."
        )
    layer = weights.get("layer_name")
    return weights["attention_map"], str(layer) if name == "attention" and layer else name


def _axes(
    values: Any, tokens: Sequence[str] | None, keys: Sequence[str] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    _, queries, count = values.shape
    columns = keys if keys is not None else (tokens if tokens is not None and len(tokens) == count else None)
    out = []
    for words, length, what in ((columns, count, "key"), (tokens, queries, "query")):
        if words is not None and len(words) != length:
            raise OptionError(f"{len(words)} tokens were given for {length} {what} positions; they must be as many.")
        axis: dict[str, Any] = {"title": {"text": what}}
        if words is not None:
            stride = max(1, length // 40)
            ticks = list(range(0, length, stride))
            axis |= {"tickvals": ticks, "ticktext": [safe(words[i])[:24] for i in ticks]}
        out.append(axis)
    return out[0], out[1]


def _draw(
    values: Any, heads: list[int], axes: tuple[dict[str, Any], dict[str, Any]], title: str, theme: Theme
) -> Figure:
    columns = min(4, math.ceil(math.sqrt(len(heads))))
    rows = math.ceil(len(heads) / columns)
    titles = [f"head {head}" for head in heads] if len(values) > 1 else None
    figure = subplots().make_subplots(
        rows=rows,
        cols=columns,
        subplot_titles=titles,
        horizontal_spacing=0.25 / (columns + 1),
        vertical_spacing=0.25 / (rows + 1),
    )
    top = float(np.nanmax(np.where(np.isfinite(values[heads]), values[heads], np.nan)))
    for place, head in enumerate(heads):
        row, column = divmod(place, columns)
        shown = values[head][:_MOST_TOKENS, :_MOST_TOKENS].astype(np.float32)
        trace = graph_objects().Heatmap(z=np.where(np.isfinite(shown), shown, np.nan), coloraxis="coloraxis",
            hovertemplate=f"head {head}<br>query %{{y}}, key %{{x}}: %{{z:.3f}}<extra></extra>")  # fmt: skip
        figure.add_trace(trace, row=row + 1, col=column + 1)
        figure.update_xaxes(**_outer(axes[0], row == rows - 1), row=row + 1, col=column + 1)
        figure.update_yaxes(**_outer(axes[1], column == 0), autorange="reversed", row=row + 1, col=column + 1)
    bar = {"title": {"text": "weight"}, "thickness": 12, "outlinewidth": 0}
    figure.update_layout(coloraxis={"colorscale": SEQUENTIAL, "cmin": 0.0, "cmax": top or 1.0, "colorbar": bar})
    cut = max(values.shape[1:]) > _MOST_TOKENS
    note = (
        f"{len(heads)} of {len(values)} heads"
        if len(heads) < len(values)
        else f"{values.shape[1]} queries by {values.shape[2]} keys"
    )
    note += f"; the first {_MOST_TOKENS} positions" if cut else ""
    return finish(figure, title, note, theme=theme, height=150 + max(260, 250 * rows))


def _outer(axis: dict[str, Any], outer: bool) -> dict[str, Any]:
    return axis if outer else {**axis, "title": {"text": ""}, "showticklabels": False}
