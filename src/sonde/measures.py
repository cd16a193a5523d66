"""Named statistics computed from rows: what `run.series(site, "std")` and the tables show.

Each is a function of rows and, for quantiles, of bins. What cannot be known from a row is NaN, never a guess:
the mean of no elements, the standard deviation of one, a quantile without a histogram.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde import schema
from sonde.errors import OptionError
from sonde.schema import Bins, Rows

Values = NDArray[np.float64]
Measure = Callable[[Rows], Values]


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


def nonfinite_share(rows: Rows) -> Values:
    """Return which share of the elements is NaN or infinite."""
    return _ratio(nonfinite(rows), rows[..., schema.COUNT])


FROM_ROWS: Final[dict[str, Measure]] = {
    "mean": _finite_column(schema.MEAN),
    "std": std,
    "var": var,
    "min": _finite_column(schema.MIN),
    "max": _finite_column(schema.MAX),
    "norm": norm,
    "rms": rms,
    "l1": _finite_column(schema.ABS_SUM),
    "abs_mean": abs_mean,
    "abs_max": abs_max,
    "zero_share": _share(schema.ZERO),
    "ge_one_share": _share(schema.GE_ONE),
    "nonfinite_share": nonfinite_share,
    "seen": _column(schema.SEEN),
    "count": _column(schema.COUNT),
    "nan": _column(schema.NAN),
    "inf": inf,
    "pos_inf": _column(schema.POS_INF),
    "neg_inf": _column(schema.NEG_INF),
    "nonfinite": nonfinite,
    "zero": _column(schema.ZERO),
    "ge_one": _column(schema.GE_ONE),
}

# Quantiles of the magnitude. The histogram has no sign, so a quantile of x itself cannot be told from it.
QUANTILES: Final[dict[str, float]] = {
    "abs_p01": 0.01,
    "abs_p05": 0.05,
    "abs_p25": 0.25,
    "abs_p50": 0.50,
    "abs_p75": 0.75,
    "abs_p95": 0.95,
    "abs_p99": 0.99,
}

NAMES: Final = (*FROM_ROWS, *QUANTILES)


def check_name(name: str, also: tuple[str, ...] = ()) -> None:
    """Raise if `name` is no statistic, naming the nearest ones."""
    known = (*NAMES, *also)
    if name not in known:
        near = get_close_matches(name, known, n=3) or list(known)
        raise OptionError(f"There is no statistic {name!r} (nearest: {', '.join(near)}). All: {', '.join(known)}.")


def compute(name: str, rows: Rows, bins: Bins | None = None) -> Values:
    """Compute one statistic for every row.

    >>> row = schema.row_of_value(3.0)
    >>> float(compute("norm", row))
    3.0
    """
    check_name(name)
    if name in FROM_ROWS:
        return FROM_ROWS[name](rows)
    if bins is None:
        return np.full(rows.shape[:-1], np.nan)
    return abs_quantile(rows, bins, QUANTILES[name])[0]


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
