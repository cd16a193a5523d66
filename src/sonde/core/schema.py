"""The one layout of a summary: twelve numbers and 64 histogram bins that merge exactly.

A *row* summarises any number of elements. Rows of parts merge into the row of the whole, so micro-batches,
calls, ranks and windows of steps are summarised apart and put together later, without a second look at the data.
An all-zero row is the empty summary; merging it changes nothing.

Rows are float64 arrays whose **last axis** has one entry per column. Histograms are unsigned integer arrays whose last
axis has `NUM_BINS` entries. Everything here is numpy: the recorder, the store and the reader share it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

SCHEMA_VERSION: Final = 1

COLUMNS: Final = (
    "seen",  # tensors merged into this row; 0 means nothing was measured here
    "count",  # elements, finite or not
    "nan",
    "pos_inf",
    "neg_inf",
    "zero",  # elements equal to 0 (both signs)
    "ge_one",  # finite elements with |x| >= 1
    "min",  # over finite elements; 0 when there is none
    "max",  # over finite elements; 0 when there is none
    "mean",  # over finite elements; 0 when there is none
    "m2",  # sum of (x - mean)**2 over finite elements
    "abs_sum",  # sum of |x| over finite elements
)
SEEN, COUNT, NAN, POS_INF, NEG_INF, ZERO, GE_ONE, MIN, MAX, MEAN, M2, ABS_SUM = range(len(COLUMNS))
NUM_COLUMNS: Final = len(COLUMNS)

# Columns that merge by adding up.
_SUMS: Final = [SEEN, COUNT, NAN, POS_INF, NEG_INF, ZERO, GE_ONE, ABS_SUM]

# Bin k counts finite, non-zero elements with 2**(k - 47) <= |x| < 2**(k - 46). The first bin also holds everything
# smaller, the last (from 2**16, where float16 has overflowed) everything larger. Zeros and non-finite elements have
# columns of their own and are in no bin.
NUM_BINS: Final = 64
FIRST_EXPONENT: Final = -47
ONE_BIN: Final = -FIRST_EXPONENT  # the bin that starts at |x| = 1

Rows = NDArray[np.float64]
Bins = NDArray[np.uint64]


def bin_edges() -> NDArray[np.float64]:
    """Return the 65 edges of the bins: 0, 2**-46, ..., 2**16, inf."""
    edges = np.ldexp(1.0, np.arange(FIRST_EXPONENT, FIRST_EXPONENT + NUM_BINS + 1))
    edges[0], edges[-1] = 0.0, np.inf
    return edges


def finite(rows: Rows) -> NDArray[np.float64]:
    """Return how many finite elements each row summarises."""
    result: NDArray[np.float64] = rows[..., COUNT] - rows[..., NAN] - rows[..., POS_INF] - rows[..., NEG_INF]
    return result


def merge_rows(left: Rows, right: Rows) -> Rows:
    """Return the rows that summarise the elements of `left` and of `right` together.

    Means and squared deviations follow Chan, Golub and LeVeque's update, which does not cancel.
    """
    left, right = np.broadcast_arrays(left, right)
    n_left, n_right = finite(left), finite(right)
    total = n_left + n_right
    weight = np.divide(n_right, total, out=np.zeros_like(total), where=total > 0)
    delta = right[..., MEAN] - left[..., MEAN]
    merged = np.empty_like(left)
    merged[..., _SUMS] = left[..., _SUMS] + right[..., _SUMS]
    merged[..., MEAN] = np.where(n_left == 0, right[..., MEAN], left[..., MEAN] + delta * weight)
    # An empty side has no mean, so its distance to the other must not count. A product, not a power: numpy squares
    # arrays but calls `pow` for scalars, which differs in the last bit, and one row must merge as many do.
    merged[..., M2] = (
        left[..., M2] + right[..., M2] + np.where(n_left * n_right > 0, delta * delta * n_left * weight, 0.0)
    )
    both = (n_left > 0) & (n_right > 0)
    only = np.where(n_left > 0, left[..., MIN], right[..., MIN])
    merged[..., MIN] = np.where(both, np.minimum(left[..., MIN], right[..., MIN]), only)
    only = np.where(n_left > 0, left[..., MAX], right[..., MAX])
    merged[..., MAX] = np.where(both, np.maximum(left[..., MAX], right[..., MAX]), only)
    return merged


def merge_groups(rows: Rows, starts: NDArray[np.intp]) -> Rows:
    """Merge consecutive rows: group i is `rows[starts[i]:starts[i + 1]]`, the last one runs to the end.

    The loop runs over the longest group; each turn merges the next row of every group at once.
    """
    lengths = np.diff(np.append(starts, len(rows)))
    merged = np.zeros((len(starts), NUM_COLUMNS))
    for offset in range(int(lengths.max(initial=0))):
        alive = lengths > offset
        merged[alive] = merge_rows(merged[alive], rows[starts[alive] + offset])
    return merged


def row_of_zeros(count: float) -> Rows:
    """Return the row that summarises `count` zeros and no tensor; merge it to add implicit zeros."""
    row = np.zeros(NUM_COLUMNS)
    row[[COUNT, ZERO]] = count
    return row


def row_of_value(value: float) -> Rows:
    """Return the row that summarises one number."""
    row: Rows = rows_of_values(np.array([value]))[0]
    return row


def rows_of_values(values: NDArray[np.float64]) -> Rows:
    """Return the rows that summarise one number each."""
    rows = np.zeros((len(values), NUM_COLUMNS))
    usable = np.isfinite(values)
    kept = np.where(usable, values, 0.0)
    rows[:, SEEN] = rows[:, COUNT] = 1.0
    rows[:, NAN] = np.isnan(values)
    rows[:, POS_INF], rows[:, NEG_INF] = np.isposinf(values), np.isneginf(values)
    rows[:, ZERO] = values == 0
    rows[:, MIN] = rows[:, MAX] = rows[:, MEAN] = kept
    rows[:, ABS_SUM] = np.abs(kept)
    rows[:, GE_ONE] = rows[:, ABS_SUM] >= 1
    return rows


def scale_rows(rows: Rows, factor: float | NDArray[np.float64]) -> Rows:
    """Return the rows of the same elements multiplied by a positive `factor`.

    `ge_one` cannot be computed from a row alone; it stays as it was and must be taken from the histogram.
    """
    scaled = rows.copy()
    factor = np.asarray(factor, dtype=np.float64)
    scaled[..., [MIN, MAX, MEAN, ABS_SUM]] *= factor[..., None]
    scaled[..., M2] *= factor * factor
    return scaled
