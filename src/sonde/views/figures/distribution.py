"""How the elements of a tensor are spread, at one moment."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from sonde import schema
from sonde.analysis import Values
from sonde.errors import OptionError
from sonde.records import Reading, Site
from sonde.store import Run
from sonde.views.figures.curves import as_values, check_bins, count_in_bins
from sonde.views.figures.library import Figure, graph_objects
from sonde.views.figures.theme import BAD, BLUE, ORANGE, Theme, empty, finish
from sonde.views.figures.words import bin_label, power

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
    # A reading of merged steps bears its first step and stands for all of them.
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
