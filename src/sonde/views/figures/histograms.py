"""Draw how the elements of a tensor are distributed, at one step and over the steps."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from sonde.analysis import Values, column_edges
from sonde.core import schema, statistics
from sonde.errors import OptionError
from sonde.records import Reading, Site, summarise
from sonde.store import Run
from sonde.views.figures.curves import as_values, check_bins, count_in_bins
from sonde.views.figures.theme import (
    BAD,
    BLUE,
    ORANGE,
    SEQUENTIAL,
    Figure,
    Theme,
    bin_label,
    colour_scale,
    empty,
    finish,
    graph_objects,
    power,
)

# --------------------------------------------------------------------------------
# How the elements of a tensor are spread, at one moment.


_TAIL: Final = 1e-4
_FEW: Final = 8


def tensor_distribution(
    source: Run | Any,
    site: Site | str | None = None,
    *,
    step: int | None = None,
    bins: int = 50,
    name: str = "",
    theme: Theme = "light",
) -> Figure:
    """Draw how the elements of a tensor are spread.

    Args:
        source: A run, or the values themselves: a list, an array or a tensor of any shape.
        site: Which site of the run.
        step: At which step of the run; the latest by default.
        bins: How many bins values are counted in. A run has counted already, in powers of two.
        name: What to call the values.
        theme: `light` or `dark`.

    """
    if isinstance(source, Run):
        if site is None:
            raise OptionError("A distribution of a run needs a site: tensor_distribution(run, 'fc.weight:gradient').")
        return _of_run(source, source.site(site), step, theme)
    check_bins(bins)
    return _of_values(as_values(source).reshape(-1), bins, name or "values", theme)


def _of_values(values: Values, bins: int, name: str, theme: Theme) -> Figure:
    title = f"Distribution of {name}"
    good = values[np.isfinite(values)]
    bad = len(values) - len(good)
    if not len(good):
        return empty(title, f"No finite value among {len(values):,}.", theme=theme)
    counts, edges = count_in_bins(good, bins)
    go = graph_objects()
    figure = go.Figure(
        go.Bar(
            x=edges[:-1] / 2 + edges[1:] / 2,
            y=counts,
            width=np.diff(edges),
            marker={"color": BLUE, "line": {"width": 0}},
            customdata=np.stack([edges[:-1], edges[1:]], axis=1),
            hovertemplate="%{customdata[0]:.4g} to %{customdata[1]:.4g}: %{y:,}<extra></extra>",
        )
    )
    mean, std = float(good.mean()), float(good.std(ddof=1)) if len(good) > 1 else 0.0
    figure.add_vline(x=mean, line={"color": ORANGE, "width": 2}, annotation_text="mean", annotation_font_color=ORANGE)
    if std:
        figure.add_vrect(x0=mean - std, x1=mean + std, fillcolor=ORANGE, opacity=0.08, line_width=0, layer="below")
    note = f"{len(values):,} elements, mean {mean:.4g}, standard deviation {std:.4g}{' (shaded)' if std else ''}"
    note += f", {bad:,} NaN or infinite left out" if bad else ""
    count_axis: dict[str, Any] = {"title": {"text": "elements"}} | ({"dtick": 1} if counts.max() <= _FEW else {})
    axes = {"xaxis": {"title": {"text": "value"}}, "yaxis": count_axis}
    return finish(figure, title, note, theme=theme, bargap=0, showlegend=False, **axes)


def _of_run(run: Run, site: Site, step: int | None, theme: Theme) -> Figure:
    title = f"Distribution of {site.key}"
    reading = _reading(run, site, step)
    if reading is None:
        when = "" if step is None else f" at step {step}"
        return empty(title, f"The run has no histogram of this site{when}; record with histogram=True.", theme=theme)
    assert reading.bins is not None
    first, last = visible(reading.bins)
    if last < first:
        return empty(title, f"All {reading.count:,} elements are zero or not finite.", theme=theme)
    index = np.arange(first, last + 1)
    share = reading.bins[first : last + 1] / max(reading.count, 1)
    figure = graph_objects().Figure(
        graph_objects().Bar(
            x=index + schema.FIRST_EXPONENT + 0.5,
            y=share,
            width=1.0,
            marker={"color": BLUE, "line": {"width": 0}},
            text=[bin_label(int(each)) for each in index],
            textposition="none",
            hovertemplate="%{text}: %{y:.2%}<extra></extra>",
        )
    )
    axis = power_axis(first, last)
    axis["range"] = [
        axis["range"][0] - 0.5,
        axis["range"][1],
    ]  # room between the first bar and the labels of the other axis
    figure.update_layout(bargap=0.04, showlegend=False, xaxis=axis)
    figure.update_yaxes(tickformat=".0%", title={"text": "share of elements"})
    if reading.nonfinite:
        figure.add_annotation(
            text=f"{reading.nonfinite:,} NaN or infinite", x=1, y=1, xref="paper", yref="paper", font={"color": BAD}
        )
    return finish(figure, title, _note(reading), theme=theme)


def _note(reading: Reading) -> str:
    zero = reading.get("zero_share")
    parts = [f"step {reading.step:,}", f"{reading.count:,} elements"]
    parts += [
        f"{label} {value:.3g}" for label, value in (("mean", reading.mean), ("std", reading.std)) if value is not None
    ]
    parts += [f"{zero:.1%} zeros (in no bar)"] if zero else []
    return ", ".join(parts)


def _reading(run: Run, site: Site, step: int | None) -> Reading | None:
    """Return what the site read at a step, or its latest reading with a histogram, without reading all of the run."""
    steps = run.stored(site, (), bins=False, stop=None if step is None else step + 1).step
    if not len(steps):
        return None
    found = _at(run, site, int(steps[-1]))
    if step is None and (found is None or found.bins is None):
        binned, _ = run.histogram(site)
        found = _at(run, site, int(binned[-1])) if len(binned) else None
    # A reading of merged steps carries its first step and counts for all of them.
    held = found is not None and found.bins is not None and (step is None or step < found.step + found.span)
    return found if held else None


def _at(run: Run, site: Site, step: int) -> Reading | None:
    return next(iter(run.readings(site, start=step, stop=step + 1)), None)


def visible(bins: Any) -> tuple[int, int]:
    """Return the first and last bin worth drawing: all but the thin end of the small ones. Empty: last < first."""
    total = bins.sum()
    if not total:
        return 0, -1
    shares = np.cumsum(bins) / total
    return int(np.searchsorted(shares, _TAIL)), int(np.flatnonzero(bins)[-1])


def power_axis(first: int, last: int, *, most: int = 14) -> dict[str, Any]:
    """Return an axis over the bins `first` to `last` with ticks at powers of two."""
    low, high = first + schema.FIRST_EXPONENT, last + schema.FIRST_EXPONENT + 1
    stride = next(stride for stride in (1, 2, 4, 8, 16) if (high - low) / stride <= most)
    ticks = [exponent for exponent in range(low, high + 1) if exponent % stride == 0]
    return {
        "tickvals": ticks,
        "ticktext": [power(2, tick) for tick in ticks],
        "title": {"text": "magnitude |x|"},
        "range": [low, high],
    }


# --------------------------------------------------------------------------------
# How the spread of a tensor moves over the steps: a heat map of its magnitudes, or ridges.


_COLUMNS: Final = 240
_RIDGES: Final = 16
_OVERLAP: Final = 2.4

Counts = NDArray[np.float64]


def histogram_over_time(
    source: Run | Any,
    site: Site | str | None = None,
    *,
    kind: Literal["heat", "ridge", "signed", "values"] = "heat",
    name: str = "",
    theme: Theme = "light",
) -> Figure:
    """Draw which values a tensor is made of, step by step.

    Args:
        source: A run; or `(steps, bins)` with the 64 counts of each step; or a list with the values of each step.
        site: Which site of the run.
        kind: `heat` shows the magnitudes of every step, `ridge` of a few as curves one behind the other, `signed` the
            lowest and highest value, the mean and the standard deviation: runs count magnitudes without their signs.
            `values` is a histogram with signs of the values themselves; of a run, those of parameters and states of
            optimizers in taped steps.
        name: What to call the values.
        theme: `light` or `dark`.

    """
    if kind not in ("heat", "ridge", "signed", "values"):
        raise OptionError(f"kind={kind!r} is not known; use 'heat', 'ridge', 'signed' or 'values'.")
    if kind in ("signed", "values"):
        return (_signed if kind == "signed" else _of_taped)(source, site, name, theme)
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


def _signed(source: Run | Any, site: Site | str | None, name: str, theme: Theme) -> Figure:
    """Draw the values with their signs, as far as a summary knows them."""
    steps, rows, name = _summaries(source, site, name)
    title = f"Values of {name} over steps"
    known = np.isfinite(rows["mean"])
    if not known.any():
        return empty(title, "No reading has finite elements.", theme=theme)
    steps, rows = steps[known], {stat: values[known] for stat, values in rows.items()}
    firsts = np.arange(len(steps))
    if len(steps) > _COLUMNS:
        firsts = np.unique(np.searchsorted(steps, column_edges(int(steps[0]), int(steps[-1]), _COLUMNS)[:-1]))
    low, high = np.minimum.reduceat(rows["min"], firsts), np.maximum.reduceat(rows["max"], firsts)
    shown, mean, std, size = steps[firsts], *(rows[stat][firsts] for stat in ("mean", "std", "abs_mean"))
    # Exact: the sums of x and of |x| are recorded, which together give the sum of the negative elements.
    negative = np.divide(size - mean, 2 * size, out=np.zeros_like(size), where=size > 0)
    go, figure = graph_objects(), graph_objects().Figure()
    unseen = {"x": shown, "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
    for top, bottom, label, fill in (
        (high, low, "lowest to highest", _faint(BLUE, 0.16)),
        (mean + std, mean - std, "mean ± standard deviation", _faint(BLUE, 0.4)),
    ):
        figure.add_trace(go.Scatter(y=top, showlegend=False, **unseen))
        figure.add_trace(go.Scatter(y=bottom, fill="tonexty", fillcolor=fill, name=label, **unseen))
    figure.add_trace(
        go.Scatter(
            x=shown, y=mean, name="mean", mode="lines", line={"color": BLUE, "width": 2},
            customdata=np.stack([low, high, std, negative], axis=1), hovertemplate=_HOVER,
        )
    )  # fmt: skip
    note = "with signs: lowest to highest and mean ± deviation, as histograms of a run count |x|; "
    note += f"at step {int(shown[-1]):,} negative elements hold {negative[-1]:.1%} of the sum of |x|"
    note += "; neighbouring steps together" if len(shown) < len(steps) else ""
    figure.update_layout(xaxis={"title": {"text": "step"}}, yaxis={"title": {"text": "value"}})
    return finish(figure, title, note, theme=theme)


_SIGNED: Final = ("min", "max", "mean", "std", "abs_mean")
_HOVER: Final = (
    "step %{x:,}: mean %{y:.4g}, std %{customdata[2]:.4g}<br>%{customdata[0]:.4g} to %{customdata[1]:.4g}"
    "<br>negative elements hold %{customdata[3]:.1%} of the sum of |x|<extra></extra>"
)


def _summaries(source: Run | Any, site: Site | str | None, name: str) -> tuple[Any, dict[str, Any], str]:
    if isinstance(source, Run):
        if site is None:
            raise OptionError("Values of a run need a site: histogram_over_time(run, 'fc.weight:gradient').")
        found = source.site(site)
        series = {stat: source.series(found, stat) for stat in _SIGNED}
        return series["mean"].steps, {stat: each.values for stat, each in series.items()}, name or found.key
    rows = np.stack([summarise(as_values(values))[0] for values in source])
    return np.arange(len(rows)), {stat: statistics.compute(stat, rows) for stat in _SIGNED}, name or "values"


_MOST_TAPED: Final = 6
_VALUE_BINS: Final = 60


def _of_taped(source: Run | Any, site: Site | str | None, name: str, theme: Theme) -> Figure:
    """Draw histograms with signs, from values that are there: passed in, or kept with a taped step."""
    if isinstance(source, Run):
        if site is None:
            raise OptionError("Values of a run need a site: histogram_over_time(run, 'fc.weight:parameter').")
        found = source.site(site)
        kept, name = list(_taped(source, found)), name or found.key
    else:
        kept = [(step, as_values(values).reshape(-1)) for step, values in enumerate(source)]
    title = f"Histogram of {name or 'values'} with signs"
    kept = [(step, values[np.isfinite(values)]) for step, values in kept[-_MOST_TAPED:]]
    kept = [(step, values) for step, values in kept if len(values)]
    if not kept:
        return empty(
            title, "No taped step holds its values: tapes keep parameters and states of optimizers.", theme=theme
        )
    _, edges = count_in_bins(np.concatenate([values for _, values in kept]), _VALUE_BINS)
    go, figure = graph_objects(), graph_objects().Figure()
    for (step, values), colour in zip(kept, colour_scale(len(kept)), strict=True):
        shares = np.histogram(values, edges)[0] / len(values)
        figure.add_trace(
            go.Scatter(
                x=np.repeat(edges, 2)[1:-1], y=np.repeat(shares, 2), mode="lines", name=f"step {step:,}",
                line={"color": colour, "width": 1.6}, hovertemplate="near %{x:.4g}: %{y:.2%}",
            )
        )  # fmt: skip
    figure.add_vline(x=0, line={"color": ORANGE, "width": 1})
    figure.update_layout(xaxis={"title": {"text": "value"}})
    figure.update_yaxes(tickformat=".0%", title={"text": "share of elements"})
    note = "every element with its sign, of steps that were taped" if isinstance(source, Run) else "every element"
    return finish(figure, title, note, theme=theme)


def _taped(run: Run, site: Site) -> Iterator[tuple[int, Values]]:
    """Yield what a site held at the taped steps that kept it."""
    roles = {"parameter": site.name, "state": f"{site.part.removeprefix('.')} of {site.name}"}
    for step in run.tapes() if site.quantity in roles else ():
        tape = run.tape(step)
        for value in tape.values:
            if value.saved and value.name == roles[site.quantity] and (content := tape.tensor(value.id)) is not None:
                yield step, content.astype(np.float64).reshape(-1)
                break


def _faint(colour: str, share: float = 0.55) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{share})"
