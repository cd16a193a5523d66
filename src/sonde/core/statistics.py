"""The one table of statistics: what can be computed from a stored row, and how it is named and drawn.

Everyone who lists statistics reads this table: series, exports, tables, figures, the viewer and the command line.
To add a derived statistic, add a row to `STATISTICS`.

What cannot be known from a row is NaN, never a guess: the mean of no elements, the standard deviation of one element,
a quantile without a histogram.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from difflib import get_close_matches
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from sonde.core import schema
from sonde.core.schema import Bins, Rows
from sonde.errors import OptionError

Values = NDArray[np.float64]
Measure = Callable[[Rows], Values]


@dataclass(frozen=True, slots=True)
class Statistic:
    """One statistic of a tensor: the columns it is computed from, the function, and its wording."""

    name: str
    needs: tuple[int, ...]
    """The stored columns that `of` reads."""
    of: Measure | None
    """Computes it from rows; None for a quantile."""
    title: str
    """Its name on axes and in menus."""
    _: KW_ONLY
    unit: Literal["share", "count"] | None = None
    """None: that of the tensor's elements."""
    log: bool = True
    """Whether it is a magnitude, which is drawn on a logarithmic axis."""
    shown: Literal["always", "in menus", "on request"] = "on request"
    """Where the viewer offers it: always (beside every site, and in copies of a run), in menus, or by name only."""
    quantile: float | None = None
    """Which quantile of the magnitude it is, estimated from the histogram."""
    quantity: str | None = None
    """The only kind of site that has it; None if every tensor does."""
    over: str | None = None
    """The quantity of the same name that it is divided by: a ratio needs two sites."""
    per_merged: float = 0.0
    """The power of the number of steps by which it grows when steps are merged into one row."""


def _ratio(numerator: Values, denominator: Values) -> Values:
    out = np.full(np.broadcast(numerator, denominator).shape, np.nan)
    result: Values = np.divide(numerator, denominator, out=out, where=denominator > 0)
    return result


def _where_finite(rows: Rows, values: Values) -> Values:
    return np.where(schema.finite(rows) > 0, values, np.nan)


def _column(index: int) -> Measure:
    return lambda rows: rows[..., index].copy()


def _finite_column(index: int) -> Measure:
    return lambda rows: _where_finite(rows, rows[..., index])


def _share(index: int) -> Measure:
    return lambda rows: _ratio(rows[..., index], rows[..., schema.COUNT])


def inf(rows: Rows) -> Values:
    """Count infinities of both signs."""
    result: Values = rows[..., schema.POS_INF] + rows[..., schema.NEG_INF]
    return result


def nonfinite(rows: Rows) -> Values:
    """Count NaN and infinities."""
    result: Values = rows[..., schema.NAN] + inf(rows)
    return result


def var(rows: Rows) -> Values:
    """Return the sample variance (n - 1 in the denominator, as `torch.var`)."""
    return _ratio(rows[..., schema.M2], schema.finite(rows) - 1)


def std(rows: Rows) -> Values:
    """Return the sample standard deviation (as `torch.std`)."""
    return np.sqrt(var(rows))


def _square_sum(rows: Rows) -> Values:
    # Exact up to rounding: the sum of squares about 0 is the sum about the mean plus n * mean**2.
    with np.errstate(over="ignore"):
        result: Values = rows[..., schema.M2] + schema.finite(rows) * rows[..., schema.MEAN] ** 2
    return result


def _unless_beyond(values: Values, rows: Rows, count: Values) -> Values:
    """Return the values; where a square was beyond the largest number, their root from the mean and deviation."""
    if not np.isinf(values).any():
        return values
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        deviation = np.sqrt(rows[..., schema.M2]) / np.sqrt(schema.finite(rows) / count)
        other: Values = np.hypot(deviation, np.abs(rows[..., schema.MEAN]) * np.sqrt(count))
    return np.where(np.isinf(values), other, values)


def norm(rows: Rows) -> Values:
    """Return the Euclidean norm of the finite elements."""
    return _where_finite(rows, _unless_beyond(np.sqrt(_square_sum(rows)), rows, schema.finite(rows)))


def rms(rows: Rows) -> Values:
    """Return the root of the mean square."""
    mean_square = _ratio(_square_sum(rows), schema.finite(rows))
    return _unless_beyond(np.sqrt(mean_square), rows, np.ones_like(mean_square))


def abs_mean(rows: Rows) -> Values:
    """Return the mean magnitude."""
    return _ratio(rows[..., schema.ABS_SUM], schema.finite(rows))


def abs_max(rows: Rows) -> Values:
    """Return the largest magnitude."""
    return _where_finite(rows, np.maximum(np.abs(rows[..., schema.MIN]), np.abs(rows[..., schema.MAX])))


def value(rows: Rows) -> Values:
    """Return the number that was logged: the mean of several, and NaN or infinity where nothing else was logged."""
    only_inf = (rows[..., schema.NAN] == 0) & ((rows[..., schema.POS_INF] > 0) ^ (rows[..., schema.NEG_INF] > 0))
    infinity = np.where(only_inf, np.where(rows[..., schema.POS_INF] > 0, np.inf, -np.inf), np.nan)
    return np.where(schema.finite(rows) > 0, rows[..., schema.MEAN], infinity)


def nonfinite_share(rows: Rows) -> Values:
    """Return which share of the elements is NaN or infinite."""
    return _ratio(nonfinite(rows), rows[..., schema.COUNT])


_FINITE: Final = (schema.COUNT, schema.NAN, schema.POS_INF, schema.NEG_INF)
_MOMENTS: Final = (*_FINITE, schema.MEAN, schema.M2)
_ALL: Final = tuple(range(schema.NUM_COLUMNS))


def _of_finite(name: str, column: int, title: str, *, log: bool = False, **more: Any) -> Statistic:
    return Statistic(name, (*_FINITE, column), _finite_column(column), title, log=log, **more)


def _share_of(name: str, column: int, title: str, **more: Any) -> Statistic:
    return Statistic(name, (column, schema.COUNT), _share(column), title, unit="share", log=False, **more)


def _count_of(name: str, column: int, title: str) -> Statistic:
    return Statistic(name, (column,), _column(column), title, unit="count")


# Of the magnitude: the histogram has no sign, so a quantile of x itself cannot be computed from it.
def _percentile(percent: int, title: str, **more: Any) -> Statistic:
    return Statistic(f"abs_p{percent:02}", _ALL, None, f"{title} of |x|", quantile=percent / 100, **more)


_ROWS: Final = (
    _of_finite("mean", schema.MEAN, "mean", shown="always"),
    Statistic("std", (*_FINITE, schema.M2), std, "standard deviation", shown="always"),
    Statistic("var", (*_FINITE, schema.M2), var, "variance"),
    _of_finite("min", schema.MIN, "minimum", shown="always"),
    _of_finite("max", schema.MAX, "maximum", shown="always"),
    Statistic("norm", _MOMENTS, norm, "norm", shown="always", per_merged=0.5),
    Statistic("rms", _MOMENTS, rms, "RMS", shown="always"),
    _of_finite("l1", schema.ABS_SUM, "L1 norm", log=True, per_merged=1.0),
    Statistic("abs_mean", (*_FINITE, schema.ABS_SUM), abs_mean, "mean |x|", shown="in menus"),
    Statistic("abs_max", (*_FINITE, schema.MIN, schema.MAX), abs_max, "max |x|", shown="always"),
    _share_of("zero_share", schema.ZERO, "share of zeros", shown="always"),
    _share_of("ge_one_share", schema.GE_ONE, "share of |x| ≥ 1", shown="in menus"),
    Statistic(
        "nonfinite_share",
        _FINITE,
        nonfinite_share,
        "share of NaN and infinity",
        unit="share",
        log=False,
        shown="in menus",
    ),
    _count_of("seen", schema.SEEN, "tensors"),
    _count_of("count", schema.COUNT, "elements"),
    _count_of("nan", schema.NAN, "NaN elements"),
    Statistic("inf", (schema.POS_INF, schema.NEG_INF), inf, "infinite elements", unit="count"),
    _count_of("pos_inf", schema.POS_INF, "elements at +infinity"),
    _count_of("neg_inf", schema.NEG_INF, "elements at -infinity"),
    Statistic("nonfinite", _FINITE[1:], nonfinite, "NaN and infinite elements", unit="count", shown="always"),
    _count_of("zero", schema.ZERO, "zero elements"),
    _count_of("ge_one", schema.GE_ONE, "elements with |x| ≥ 1"),
    _percentile(1, "1st percentile"),
    _percentile(5, "5th percentile"),
    _percentile(25, "25th percentile"),
    _percentile(50, "median", shown="in menus"),
    _percentile(75, "75th percentile"),
    _percentile(95, "95th percentile", shown="in menus"),
    _percentile(99, "99th percentile", shown="in menus"),
    Statistic(
        "ratio",
        _MOMENTS,
        norm,
        "update / weight norm",
        shown="in menus",
        quantity="update",
        over="parameter",
    ),
    Statistic("value", (*_FINITE, schema.MEAN), value, "value", log=False, quantity="scalar"),
)

STATISTICS: Final[dict[str, Statistic]] = {row.name: row for row in _ROWS}

# The statistic that says most about each quantity, in the order in which pages list quantities.
USUAL: Final[dict[str, str]] = {
    "gradient": "rms",
    "parameter": "rms",
    "update": "ratio",
    "output": "rms",
    "output_gradient": "rms",
    "input": "rms",
    "state": "rms",
    "value": "rms",
    "scalar": "value",
    "vital": "mean",
}


def names() -> tuple[str, ...]:
    """Return the names of the statistics that every tensor has."""
    return tuple(name for name, row in STATISTICS.items() if row.quantity is None)


def find(name: str) -> Statistic:
    """Return a statistic by name.

    Raises:
        OptionError: There is none; the message names the nearest ones.

    """
    if name not in STATISTICS:
        near = get_close_matches(name, STATISTICS, n=3) or list(STATISTICS)
        raise OptionError(f"There is no statistic {name!r} (nearest: {', '.join(near)}). All: {', '.join(STATISTICS)}.")
    return STATISTICS[name]


def compute(name: str, rows: Rows, bins: Bins | None = None) -> Values:
    """Compute one statistic for every row.

    >>> row = schema.row_of_value(3.0)
    >>> float(compute("norm", row))
    3.0

    Raises:
        OptionError: There is no such statistic, or it needs a second site.

    """
    row = find(name)
    if row.over is not None:
        raise OptionError(f"{name!r} needs the {row.quantity} and its {row.over}; a row of one of them is not enough.")
    if row.of is not None:
        return row.of(rows)
    if bins is None or row.quantile is None:
        return np.full(rows.shape[:-1], np.nan)
    return abs_quantile(rows, bins, row.quantile)[0]


def abs_quantile(rows: Rows, bins: Bins, q: float) -> tuple[Values, Values, Values]:
    """Estimate the q-quantile of |x| over the n finite elements: the one of rank floor(q * (n - 1)) when sorted.

    Returns:
        The estimate and its bounds (low, high). The true quantile lies between the bounds, which are the edges of the
        bin that holds it, tightened by the largest magnitude; they are at most a factor of two apart except in the
        two open bins at the ends. NaN where there is no histogram.

    """
    if not 0.0 <= q <= 1.0:
        raise OptionError(f"A quantile lies between 0 and 1; got {q!r}.")
    zeros = rows[..., schema.ZERO]
    total = zeros + bins.sum(-1)
    rank = np.floor(q * np.maximum(total - 1, 0))
    below = zeros[..., None] + np.concatenate([np.zeros((*bins.shape[:-1], 1)), np.cumsum(bins, -1)], -1)
    # The bin k with below[k] <= rank < below[k + 1]; ranks before the first count are zeros.
    index = np.clip((below[..., 1:] <= rank[..., None]).sum(-1), 0, schema.NUM_BINS - 1)
    edges, largest = schema.bin_edges(), abs_max(rows)
    low, high = edges[index], np.minimum(edges[index + 1], largest)
    start = np.take_along_axis(below, index[..., None], -1)[..., 0]
    inside = np.take_along_axis(bins, index[..., None], -1)[..., 0].astype(np.float64)
    share = np.clip(_ratio(rank - start + 0.5, inside), 0.0, 1.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        # Within a bin the logarithm is taken to be uniform; the open first bin has no lower edge to take it from.
        guess = np.where(low > 0, low * (high / low) ** share, high * share)
    is_zero = rank < zeros
    known = bins.any(-1) | (zeros > 0)
    parts = (np.where(known, np.where(is_zero, 0.0, part), np.nan) for part in (guess, low, high))
    estimate, low, high = parts
    return estimate, low, high
