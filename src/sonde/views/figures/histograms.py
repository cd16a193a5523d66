"""How the spread of a tensor moves over the steps: a heat map of its magnitudes, or ridges."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from sonde import schema
from sonde.analysis import column_edges
from sonde.errors import OptionError
from sonde.records import Site, summarise
from sonde.store import Run
from sonde.views.figures.curves import as_values
from sonde.views.figures.distribution import power_axis, visible
from sonde.views.figures.library import Figure, graph_objects
from sonde.views.figures.theme import SEQUENTIAL, Theme, colour_scale, empty, finish
from sonde.views.figures.words import bin_label

_COLUMNS: Final = 240
_RIDGES: Final = 16
_OVERLAP: Final = 2.4

Counts = NDArray[np.float64]


def histogram_over_time(
    source: Run | Any,
    site: Site | str | None = None,
    *,
    kind: Literal["heat", "ridge"] = "heat",
    name: str = "",
    theme: Theme = "light",
) -> Figure:
    """Draw which magnitudes a tensor is made of, step by step.

    Args:
        source: A run; or `(steps, bins)` with the 64 counts of each step; or a list with the values of each step.
        site: Which site of the run.
        kind: `heat` shows every step, `ridge` a few of them as curves one behind the other.
        name: What to call the values.
        theme: `light` or `dark`.

    """
    if kind not in ("heat", "ridge"):
        raise OptionError(f"kind={kind!r} is not known; use 'heat' or 'ridge'.")
    steps, bins, name = _counts(source, site, name)
    title = f"Magnitudes of {name} over steps"
    if not len(steps) or not bins.any():
        return empty(
            title, "There is no histogram of finite, non-zero elements; record with histogram=True.", theme=theme
        )
    return (_heat if kind == "heat" else _ridge)(steps, bins, title, theme)


def _counts(source: Run | Any, site: Site | str | None, name: str) -> tuple[NDArray[np.int64], Counts, str]:
    if isinstance(source, Run):
        if site is None:
            raise OptionError("Histograms of a run need a site: histogram_over_time(run, 'fc.weight:gradient').")
        found = source.site(site)
        steps, bins = source.histogram(found)
        return steps, bins.astype(np.float64), name or found.key
    if isinstance(source, tuple) and len(source) == 2 and np.ndim(source[1]) == 2:
        given = as_values(source[1])
        if given.shape[1] != schema.NUM_BINS:
            raise OptionError(f"A histogram has {schema.NUM_BINS} bins; got {given.shape[1]}.")
        return as_values(source[0]).astype(np.int64), given, name or "values"
    counts = [summarise(as_values(values))[1].astype(np.float64) for values in source]
    return np.arange(len(counts)), np.array(counts).reshape(-1, schema.NUM_BINS), name or "values"


def _merged(steps: NDArray[np.int64], bins: Counts, most: int) -> tuple[NDArray[np.int64], Counts]:
    """Add up the histograms of neighbours until there are at most `most`: no element is lost."""
    if len(steps) <= most:
        return steps, bins
    cuts = np.searchsorted(steps, column_edges(int(steps[0]), int(steps[-1]), most))
    pairs = [(first, last) for first, last in pairwise(cuts) if last > first]
    return steps[[first for first, _ in pairs]], np.array([bins[first:last].sum(axis=0) for first, last in pairs])


def _shares(bins: Counts) -> Counts:
    total = bins.sum(axis=1, keepdims=True)
    shares: Counts = np.divide(bins, total, out=np.zeros_like(bins), where=total > 0)
    return shares


def _heat(steps: NDArray[np.int64], bins: Counts, title: str, theme: Theme) -> Figure:
    shown, merged = _merged(steps, bins, _COLUMNS)
    first, last = visible(bins.sum(axis=0))
    shares = _shares(merged)[:, first : last + 1].T
    words = [[bin_label(index)] * len(shown) for index in range(first, last + 1)]
    figure = graph_objects().Figure(
        graph_objects().Heatmap(
            x=shown,
            y=np.arange(first, last + 1) + schema.FIRST_EXPONENT + 0.5,
            z=np.where(shares > 0, shares, np.nan),
            text=words,
            colorscale=SEQUENTIAL,
            colorbar={
                "title": {"text": "share of<br>elements"},
                "tickformat": ".0%",
                "thickness": 12,
                "outlinewidth": 0,
            },
            hovertemplate="step %{x}<br>%{text}: %{z:.2%}<extra></extra>",
        )
    )
    figure.update_layout(yaxis=power_axis(first, last), xaxis={"title": {"text": "step"}})
    note = "share of non-zero elements in each power of two" + (
        ", neighbouring steps added up" if len(shown) < len(steps) else ""
    )
    return finish(figure, title, note, theme=theme)


def _ridge(steps: NDArray[np.int64], bins: Counts, title: str, theme: Theme) -> Figure:
    picked = np.unique(np.linspace(0, len(steps) - 1, _RIDGES).round().astype(int))
    first, last = visible(bins.sum(axis=0))
    shares = _shares(bins)[picked][:, first : last + 1]
    edges = np.arange(first, last + 2) + schema.FIRST_EXPONENT
    # A bar over each bin, not a curve through their middles: nothing is claimed between the edges.
    across = np.repeat(edges, 2)[1:-1]
    go, figure = graph_objects(), graph_objects().Figure()
    scale = _OVERLAP / max(float(shares.max()), 1e-12)
    colours = colour_scale(len(picked))
    # From the back: later steps lie lower and in front.
    for place in range(len(picked)):
        base = float(len(picked) - 1 - place)
        height = base + np.repeat(shares[place], 2) * scale
        step = int(steps[picked[place]])
        common = {"x": across, "line": {"color": colours[place], "width": 1.5}, "showlegend": False}
        floor = {**common, "line": {"width": 0}, "hoverinfo": "skip", "mode": "lines"}
        figure.add_trace(go.Scatter(y=np.full(len(across), base), **floor))
        words = [
            f"step {step:,}<br>{bin_label(index)}: {shares[place][index - first]:.2%}"
            for index in range(first, last + 1)
        ]
        figure.add_trace(
            go.Scatter(
                y=height, fill="tonexty", fillcolor=_faint(colours[place]), mode="lines", text=np.repeat(words, 2),
                hovertemplate="%{text}<extra></extra>", **common,
            )
        )  # fmt: skip
    ticks = [float(len(picked) - 1 - place) for place in range(len(picked))]
    figure.update_layout(
        xaxis=power_axis(first, last),
        yaxis={"tickvals": ticks, "ticktext": [f"{int(steps[i]):,}" for i in picked], "title": {"text": "step"}},
        height=560,
    )
    return finish(figure, title, "one ridge a step, the latest in front", theme=theme)


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.55)"
