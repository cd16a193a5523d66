"""One statistic of one site over the steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from sonde.core import schema, statistics
from sonde.core.schema import Bins, Rows
from sonde.errors import MissingExtra
from sonde.records import Site

if TYPE_CHECKING:
    import pandas

ALL_COLUMNS: Final = tuple(range(schema.NUM_COLUMNS))


@dataclass(frozen=True, slots=True, eq=False)
class Readings:
    """Readings of one site in rising order of steps; columns that were not requested are zero."""

    step: NDArray[np.int64]
    span: NDArray[np.uint32]
    merged: NDArray[np.float64]
    """How many readings of one rank each row holds: 1, or more where the store thinned."""
    rows: Rows
    bins: Bins | None
    binned: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Series:
    """One statistic of one site over the steps.

    `values[i]` belongs to the steps `steps[i]` to `steps[i] + spans[i] - 1`. Where the store has merged several steps
    into one row, `norm` is the root of the mean squared norm and `l1` the mean over those steps, so that thinning
    does not show as a jump; counts are totals.
    """

    site: Site
    stat: str
    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    spans: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        name = f"{self.site.key} {self.stat}"
        if not len(self):
            return f"<Series {name}: empty>"
        return (
            f"<Series {name}: {len(self)} values, step {self.steps[0]} to {self.steps[-1]}, last {self.values[-1]:.4g}>"
        )

    def to_pandas(self) -> pandas.Series[float]:
        """Return the values as a pandas Series with the steps as its index."""
        try:
            import pandas
        except ImportError:
            raise MissingExtra("pandas", "export", "A pandas Series") from None
        index = pandas.Index(self.steps, name="step")
        return pandas.Series(self.values, index=index, name=f"{self.site.key} {self.stat}")


def compute(stat: str, readings: Readings) -> NDArray[np.float64]:
    """Compute a statistic for every reading."""
    row = statistics.find(stat)
    values = statistics.compute(stat, readings.rows, readings.bins)
    if row.quantile is not None:
        return np.where(readings.binned, values, np.nan)
    return values / readings.merged**row.per_merged if row.per_merged else values


def ratio_of(update: Series, weight: Series) -> Series:
    """Return the norms of an update over those of its parameter, at the steps that have both; NaN over zero."""
    steps, left, right = np.intersect1d(update.steps, weight.steps, assume_unique=True, return_indices=True)
    norms = weight.values[right]
    ratios = np.full(len(steps), np.nan)
    np.divide(update.values[left], norms, out=ratios, where=norms > 0)
    return Series(update.site, "ratio", steps, ratios, update.spans[left])


def first_of(parts: list[Readings]) -> Readings:
    """Return the readings of copies of the same tensor: those of the first rank, and of others where it has none."""
    whole = parts[0]
    for part in parts[1:]:
        if np.array_equal(part.step, whole.step):
            continue
        place = np.searchsorted(whole.step, part.step, side="right")
        ends = np.append(0, np.maximum.accumulate(whole.step + whole.span))
        begins = np.append(whole.step, np.iinfo(np.int64).max)
        ends[0] = np.iinfo(np.int64).min
        free = (ends[place] <= part.step) & (part.step + part.span <= begins[place])
        if free.any():
            whole = _interleave(whole, take(part, np.flatnonzero(free)))
    return whole


def only_whole(readings: Readings, size: int | None) -> Readings:
    """Return those merged readings that have all elements of a tensor of `size` elements; None: all."""
    if size is None:
        return readings
    return take(readings, np.flatnonzero(readings.rows[:, schema.COUNT] == size * readings.merged))


def take(readings: Readings, index: NDArray[np.intp]) -> Readings:
    """Return some of the readings."""
    return Readings(
        step=readings.step[index],
        span=readings.span[index],
        merged=readings.merged[index],
        rows=readings.rows[index],
        bins=None if readings.bins is None else readings.bins[index],
        binned=readings.binned[index],
    )


def _interleave(left: Readings, right: Readings) -> Readings:
    joined = Readings(
        step=np.concatenate([left.step, right.step]),
        span=np.concatenate([left.span, right.span]),
        merged=np.concatenate([left.merged, right.merged]),
        rows=np.concatenate([left.rows, right.rows]),
        bins=None if left.bins is None or right.bins is None else np.concatenate([left.bins, right.bins]),
        binned=np.concatenate([left.binned, right.binned]),
    )
    return take(joined, np.argsort(joined.step, kind="stable"))


def merge_overlapping(parts: list[Readings]) -> Readings:
    """Merge the readings of several ranks: those whose steps overlap become one.

    Ranks mostly have the same steps; where one has been thinned and another not, the wider window wins.
    """
    step = np.concatenate([part.step for part in parts])
    order = np.argsort(step, kind="stable")
    step = step[order]
    end = step + np.concatenate([part.span for part in parts])[order]
    reach = np.maximum.accumulate(end)
    first = np.ones(len(step), dtype=bool)
    first[1:] = step[1:] >= reach[:-1]
    starts = np.flatnonzero(first)
    rows = schema.merge_groups(np.concatenate([part.rows for part in parts])[order], starts)
    total = np.add.reduceat(np.concatenate([part.merged for part in parts])[order], starts) if len(step) else step
    rank = np.repeat(np.arange(len(parts)), [len(part) for part in parts])[order]
    return Readings(
        step=step[starts],
        span=(np.maximum.reduceat(end, starts) - step[starts]).astype(np.uint32) if len(step) else end.astype("u4"),
        merged=total / _distinct(rank, starts),
        rows=rows,
        bins=_merge_bins([part.bins for part in parts], order, starts),
        binned=_all_in_group(np.concatenate([part.binned for part in parts])[order], starts),
    )


def _distinct(rank: NDArray[np.intp], starts: NDArray[np.intp]) -> NDArray[np.float64]:
    """Count the distinct ranks in every group."""
    if not len(rank):
        return np.ones(0)
    group = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(rank))))
    pairs = np.unique(group * (int(rank.max()) + 1) + rank) // (int(rank.max()) + 1)
    return np.bincount(pairs, minlength=len(starts)).astype(np.float64)


def _merge_bins(parts: list[Bins | None], order: NDArray[np.intp], starts: NDArray[np.intp]) -> Bins | None:
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    bins = np.concatenate(known)[order]
    return np.add.reduceat(bins, starts, axis=0) if len(bins) else bins


def _all_in_group(flags: NDArray[np.bool_], starts: NDArray[np.intp]) -> NDArray[np.bool_]:
    return np.logical_and.reduceat(flags, starts) if len(flags) else flags
