"""Convert runs, series and plain values to curves and grids that figures draw, few enough points for a browser."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.analysis import Steps, Values, column_edges, thin
from sonde.core import statistics
from sonde.errors import OptionError
from sonde.records import Site
from sonde.store import Run, Series
from sonde.store.series import compute, ratio_of
from sonde.views.figures.theme import BAD, COLOURS, Figure, cut, graph_objects, linear_axis, log_axis, safe

MOST_POINTS: Final = 1000
MOST_COLUMNS: Final = 400
_HUGE: Final = 1e307
_LARGEST: Final = float(np.finfo(np.float64).max)


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """A named curve over steps. Values that are not finite are gaps; `bad` says where a tensor was not finite."""

    name: str
    steps: Steps
    values: Values
    bad: NDArray[np.bool_]

    @classmethod
    def of(cls, name: str, steps: Steps, values: Values) -> Line:
        """Return a curve that is bad where it is not finite itself."""
        return cls(name, steps, values, ~np.isfinite(values))

    @property
    def known(self) -> bool:
        """Whether it has any finite value."""
        return bool(np.isfinite(self.values).any())

    def thinned(self, most: int = MOST_POINTS) -> Line:
        """Return the line with at most `most` points; lowest and highest values survive."""
        return Line.of(self.name, *thin(self.steps, self.values, most))

    @property
    def bad_steps(self) -> Steps:
        """The steps at which something was not finite."""
        return self.steps[self.bad]


def as_values(values: Any) -> Values:
    """Return numbers as a float64 array, whatever they came in: lists, numpy, or tensors of any device and dtype.

    Complex numbers are drawn by their magnitude.
    """
    refuse_names(values, "numbers")
    values = _from_tensor(values) if hasattr(values, "detach") else values
    try:
        array = np.asarray(values)
        return np.abs(array).astype(np.float64) if np.iscomplexobj(array) else array.astype(np.float64)
    except (TypeError, ValueError):
        raise OptionError(f"Figures are drawn from numbers; got {type(values).__name__}: {values!r:.80}.") from None


def refuse_names(given: Any, wanted: str) -> None:
    """Tell who hands in the path of a run, or nothing, what figures are drawn from.

    Raises:
        OptionError: It is a path or None.

    """
    if isinstance(given, str | Path):
        raise OptionError(f"{str(given)!r} is a name; open the run first: sonde.open_run({str(given)!r}).")
    if given is None:
        raise OptionError(f"Figures are drawn from {wanted}; got None.")


def _from_tensor(tensor: Any) -> Any:
    """Return the numbers of a tensor, which is recognised by its methods so that torch is not needed here."""
    if getattr(tensor, "is_meta", False):
        raise OptionError("Figures are drawn from numbers; got a tensor on the meta device, which has none.")
    tensor = tensor.detach()
    if getattr(tensor, "is_sparse", False) or "sparse" in str(getattr(tensor, "layout", "")):
        tensor = tensor.to_dense()
    if getattr(tensor, "is_complex", bool)():
        tensor = tensor.abs()
    tensor = tensor.cpu()
    return tensor.double().numpy() if hasattr(tensor, "double") else tensor.numpy()


def as_line(name: str, given: Any) -> Line:
    """Return a curve: from a series, from `(steps, values)`, or from values alone, which count from 0."""
    if isinstance(given, Series):
        return Line.of(name or given.site.key, given.steps, given.values)
    if isinstance(given, tuple) and len(given) == 2 and np.ndim(given[0]) == 1:
        steps, values = as_values(given[0]), as_values(given[1]).reshape(-1)
        if len(steps) != len(values):
            raise OptionError(f"{name!r} has {len(steps)} steps and {len(values)} values; they must be as many.")
        order = np.argsort(steps, kind="stable")
        return Line.of(name, steps[order].astype(np.int64), values[order])
    values = as_values(given).reshape(-1)
    return Line.of(name, np.arange(len(values)), values)


def as_lines(given: Any, name: str = "value") -> list[Line]:
    """Return the curves of a mapping by name, of a sequence of series, or the one curve that was passed in."""
    if isinstance(given, Mapping):
        return [as_line(str(key), value) for key, value in given.items()]
    if isinstance(given, Iterable) and not isinstance(given, np.ndarray | tuple | str):
        items = list(given)
        if items and all(isinstance(item, Series) for item in items):
            return [as_line("", item) for item in items]
        given = items
    return [as_line(name, given)]


def read_lines(
    run: Run, sites: Sequence[Site], stat: str, *, start: int | None = None, stop: int | None = None
) -> list[Line]:
    """Read one statistic of several sites, each named after its key."""
    row = statistics.find(stat)
    fits = len(sites) > 1 and all(row.quantity in (None, site.quantity) for site in sites)
    if fits and row.over is not None:
        lines = _read_ratios(run, sites, start, stop)
    elif fits and row.quantile is None:
        lines = _read_together(run, sites, stat, start, stop)
    else:
        lines = (read_line(run, site, stat, start=start, stop=stop) for site in sites)
    return [line for line in lines if len(line.steps)]


def _read_together(run: Run, sites: Sequence[Site], stat: str, start: int | None, stop: int | None) -> Iterator[Line]:
    needs = tuple(sorted({*statistics.find(stat).needs, *statistics.find("nonfinite").needs}))
    shared = np.zeros(0, np.int64)
    for site, found in zip(sites, run.stored_many(sites, needs, start=start, stop=stop), strict=True):
        # Mostly all sites are read at the same steps, which need not be held again for each of them.
        shared = shared if np.array_equal(shared, found.step) else found.step.copy()
        values = compute(stat, found)
        bad = ~np.isfinite(values) if site.quantity == "scalar" else compute("nonfinite", found) > 0
        yield Line(site.key, shared, values, bad)


def _read_ratios(run: Run, sites: Sequence[Site], start: int | None, stop: int | None) -> Iterator[Line]:
    weights = [run.site(f"{site.name}:parameter") for site in sites]
    needs = statistics.find("norm").needs
    both = (run.stored_many(each, needs, start=start, stop=stop) for each in (sites, weights))
    for site, weight, mine, its in zip(sites, weights, *both, strict=True):
        update = Series(site, "norm", mine.step, compute("norm", mine), mine.span)
        ratio = ratio_of(update, Series(weight, "norm", its.step, compute("norm", its), its.span))
        bad_steps = mine.step[compute("nonfinite", mine) > 0]
        yield Line(site.key, ratio.steps, ratio.values, np.isin(ratio.steps, bad_steps))


def span_of_readings(run: Run, sites: Sequence[Site], step: int | None, most: int) -> tuple[int | None, int | None]:
    """Return from which step and up to which to read: the latest reading at a step, or else the last `most` readings.

    Where the budget thins a recording, most steps have no reading of a tensor; the one before still holds.
    """
    if not sites:
        return None, None
    steps = run.stored(sites[0], (), bins=False, stop=None if step is None else step + 1).step
    if not len(steps):
        return step, None if step is None else step + 1
    if step is not None:
        return int(steps[-1]), step + 1
    return (int(steps[-most]) if len(steps) > most else None), None


def read_line(run: Run, site: Site, stat: str, *, start: int | None = None, stop: int | None = None) -> Line:
    """Read one statistic of a site, and where the site was not finite."""
    series = run.series(site, stat, start=start, stop=stop)
    if site.quantity == "scalar":
        return Line.of(site.key, series.steps, series.values)
    found = run.stored(site, statistics.find("nonfinite").needs, bins=False, start=start, stop=stop)
    bad_steps = found.step[compute("nonfinite", found) > 0]
    return Line(site.key, series.steps, series.values, np.isin(series.steps, bad_steps))


def extremes(line: Line, edges: Values, *, log: bool) -> Values:
    """Return for each column between two edges the value that is farthest from the curve's median.

    A spike of one step is seen however many steps share its column. Where `log` is set these are magnitudes, and
    distances are in decades.
    """
    out = np.full(len(edges) - 1, np.nan)
    finite = np.isfinite(line.values)
    steps, values = line.steps[finite], line.values[finite]
    values = np.abs(values) if log else values
    cuts = np.searchsorted(steps, edges)
    full = np.flatnonzero(cuts[1:] > cuts[:-1])
    if not len(full):
        return out
    starts, values = cuts[full], values[: cuts[-1]]
    middle = float(np.median(values))
    high, low = np.maximum.reduceat(values, starts), np.minimum.reduceat(values, starts)
    if log:
        above, below = (_decades(each) - _decades(np.array([middle])) for each in (high, low))
    else:
        above, below = high - middle, low - middle
    with np.errstate(invalid="ignore"):
        out[full] = np.where(np.nan_to_num(np.abs(below)) > np.nan_to_num(np.abs(above)), low, high)
    return out


def _decades(sizes: Values) -> Values:
    # Zero is farther down than any number, but not infinitely: two zeros have no distance between them.
    logs: Values = np.log10(sizes, out=np.full(sizes.shape, -400.0), where=sizes > 0)
    return logs


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Rows by columns of numbers, with the step that each column begins at and where something was not finite."""

    names: list[str]
    steps: Values
    values: Values
    bad: NDArray[np.bool_]
    thinned: bool = False


def as_grid(lines: Sequence[Line], *, log: bool, most: int = MOST_COLUMNS) -> Grid:
    """Put curves under each other; many steps share a column."""
    used = [line for line in lines if len(line.steps)]
    first = min((int(line.steps[0]) for line in used), default=0)
    last = max((int(line.steps[-1]) for line in used), default=0)
    seen = _all_steps(used)
    thinned = len(seen) > most
    if thinned or not len(seen):
        edges = column_edges(first, last, most)
    else:
        edges = np.append(seen, seen[-1] + 1).astype(np.float64)
    values = [extremes(line, edges, log=log) for line in used]
    bad = [_any_bad(line, edges) for line in used]
    shape = (len(used), len(edges) - 1)
    return Grid(
        names=[line.name for line in used],
        steps=np.ceil(edges[:-1]),
        values=np.array(values, dtype=np.float64).reshape(shape),
        bad=np.array(bad, dtype=np.bool_).reshape(shape),
        thinned=thinned,
    )


def _all_steps(lines: Sequence[Line]) -> Steps:
    if not lines:
        return np.zeros(0, np.int64)
    first = lines[0].steps
    # Mostly all were read at the same steps, which need not be sorted then.
    if all(line.steps is first or np.array_equal(line.steps, first) for line in lines):
        return first
    return np.unique(np.concatenate([line.steps for line in lines]))


def _any_bad(line: Line, edges: Values) -> NDArray[np.bool_]:
    total = np.concatenate([[0], np.cumsum(line.bad)])
    cuts = np.searchsorted(line.steps, edges)
    result: NDArray[np.bool_] = total[cuts[1:]] > total[cuts[:-1]]
    return result


def wants_log(values: Values, *, span: float = 30.0) -> bool:
    """Return whether positive numbers are so far apart that only decades show their differences."""
    known = values[np.isfinite(values)]
    return bool(len(known) and known.min() > 0 and float(known.max()) / float(known.min()) > span)


def check_bins(bins: Any, most: int = 1000) -> None:
    """Raise an error unless this many bins can be drawn."""
    if not isinstance(bins, int) or not 1 <= bins <= most:
        raise OptionError(f"bins={bins!r} cannot be drawn; use a whole number from 1 to {most}.")


def count_in_bins(values: Values, bins: int) -> tuple[NDArray[np.int64], Values]:
    """Count finite values in bins of equal width; return the counts and the edges, whatever the values.

    Values that are all but equal get bins around them, and a range beyond the largest float is drawn too.
    """
    low, high = float(values.min()), float(values.max())
    scale = 1.0 if max(abs(low), abs(high)) < _HUGE else 0.25
    low, high = low * scale, high * scale
    room = 2 * bins * float(np.spacing(max(abs(low), abs(high))))
    if high - low < room:
        low, high = low - max(room, 0.5), high + max(room, 0.5)
    counts, edges = np.histogram(values * scale, bins=bins, range=(low, high))
    with np.errstate(over="ignore"):
        return counts.astype(np.int64), np.clip(edges / scale, -_LARGEST, _LARGEST)


# --------------------------------------------------------------------------------
# Curves over steps, drawn alike in all figures.


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
    """Return an axis over steps; where there are few it counts them one by one, since steps are whole."""
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
    words = {
        int(step): _bad_word(float(value))
        for line in lines
        for step, value in zip(line.bad_steps[:most], line.values[line.bad][:most], strict=True)
    }
    steps = sorted(words)[:most]
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
        text=[words[step] for step in steps],
        hovertemplate="step %{x:,}: %{text}<extra></extra>",
    )
    figure.add_trace(trace, **({} if where is None else {"row": where, "col": 1}))
    if not len(everything):  # then no number on the axis means anything
        figure.update_yaxes(showticklabels=False, **({} if where is None else {"row": where, "col": 1}))


def _bad_word(value: float) -> str:
    if np.isfinite(value):
        return "NaN or infinite elements"
    return "NaN" if np.isnan(value) else "infinite"
