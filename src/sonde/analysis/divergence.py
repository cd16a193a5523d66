"""Find where two runs diverge: the first step, and the first site in that step, at which their readings differ.

Two trainings of the same program should read the same until something sets them apart: a seed, an operation that is
not deterministic, a changed setting. The first difference is nearest to the cause; the later ones follow from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.analysis.downsample import Values
from sonde.analysis.unusual import RECENT, ModelOrder
from sonde.core import schema
from sonde.core.statistics import compute
from sonde.records import Quantity, Site
from sonde.store import Run
from sonde.store.series import ALL_COLUMNS

# The order in which a step reads its quantities; a parameter's reading is the one after its update.
_ORDER: Final[tuple[Quantity, ...]] = (
    "input",
    "output",
    "value",
    "scalar",
    "output_gradient",
    "gradient",
    "state",
    "update",
    "parameter",
)
_MACHINE: Final = ("process.", "system.")  # how the machine is doing differs always, and parts no runs
_FIRST_STEPS: Final = 128
_MOST_STEPS: Final = 8192
_MOST_READINGS: Final = 20_000_000
"""How many readings of each run are looked at; it bounds the time on runs that never part."""


@dataclass(frozen=True, slots=True)
class Parting:
    """A site whose readings differ at a step. `left` and `right` are the root mean squares there."""

    site: str
    step: int
    left: float
    right: float
    difference: float
    """How far rms and mean are apart, as a part of the larger rms; infinite where only one is finite."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two runs part, and what was compared for it."""

    first: Parting | None
    """The first place in the first step that differs; None if nothing does."""
    together: tuple[Parting, ...]
    """All that differs at that step, in the order in which a step computes it."""
    steps: int
    """How many common steps were compared."""
    sites: int
    """How many common sites were compared."""
    complete: bool
    """Whether all common steps were compared, up to the one that differs."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One site in two runs: the medians of its recent root mean squares."""

    site: str
    left: float
    right: float

    @property
    def doublings(self) -> float:
        """How often the left value is to be doubled to become the right one; NaN where either is not positive."""
        positive = self.left > 0 and self.right > 0
        return float(np.log2(self.right / self.left)) if positive else float("nan")


def divergence(left: Run, right: Run, *, tolerance: float = 0.0) -> Divergence:
    """Find where two runs part.

    Args:
        left: A run.
        right: Another run of a model with the same names.
        tolerance: How far readings may be apart, as a part of their size, and still count as the same.

    """
    sites = common_sites(left, right)
    common = np.intersect1d(left.steps, right.steps, assume_unique=True)
    compared = 0
    for steps in _windows(common, len(sites)):
        parted = [found for site in sites if (found := _first_in(left, right, site, steps, tolerance)) is not None]
        compared += len(steps)
        if parted:
            at = min(found.step for found in parted)
            together = tuple(found for found in parted if found.step == at)
            before = int((common <= at).sum())
            return Divergence(together[0], together, before, len(sites), True)
    return Divergence(None, (), compared, len(sites), compared == len(common))


def common_sites(left: Run, right: Run) -> list[Site]:
    """Return the left run's sites that the right one has too, in the order in which a step computes them."""
    theirs = {site.key for site in right.sites}
    order = ModelOrder(left.header, left.sites)
    shared = [site for site in left.sites if site.key in theirs and site.same_as is None and _is_of_training(site)]
    return sorted(shared, key=lambda site: (_ORDER.index(site.quantity), _place(order, site)))


def _is_of_training(site: Site) -> bool:
    return site.quantity in _ORDER and not (site.quantity == "scalar" and site.name.startswith(_MACHINE))


def _place(order: ModelOrder, site: Site) -> tuple[int, ...]:
    place = order.of_site(site)
    # Backward the last layer comes first.
    return tuple(-part for part in place) if site.quantity in ("output_gradient", "gradient") else place


def _windows(steps: NDArray[np.int64], sites: int) -> Iterator[NDArray[np.int64]]:
    """Cut the steps into windows that grow: runs that part early are found early."""
    at, size, left = 0, _FIRST_STEPS, max(_MOST_READINGS // max(sites, 1), _FIRST_STEPS)
    while at < len(steps) and left > 0:
        yield steps[at : at + size]
        at, left = at + size, left - size
        size = min(2 * size, _MOST_STEPS, max(left, 1))


def _first_in(left: Run, right: Run, site: Site, steps: NDArray[np.int64], tolerance: float) -> Parting | None:
    start, stop = int(steps[0]), int(steps[-1]) + 1
    ours = left.stored(site, ALL_COLUMNS, bins=False, start=start, stop=stop)
    theirs = right.stored(right.site(site.key), ALL_COLUMNS, bins=False, start=start, stop=stop)
    _, here, there = np.intersect1d(ours.step, theirs.step, assume_unique=True, return_indices=True)
    if not len(here):
        return None
    one, two = ours.rows[here], theirs.rows[there]
    apart = _apart(one, two)
    wrong = np.flatnonzero(apart > tolerance)
    if not len(wrong):
        return None
    at = int(wrong[0])
    ours_rms, theirs_rms = (float(compute("rms", rows[at], None)) for rows in (one, two))
    return Parting(site.key, int(ours.step[here[at]]), ours_rms, theirs_rms, float(apart[at]))


def _apart(one: Values, two: Values) -> Values:
    """Return how far readings are apart: at least a tiny bit wherever any number in the rows differs."""
    rms = [compute("rms", rows, None) for rows in (one, two)]
    mean = [compute("mean", rows, None) for rows in (one, two)]
    size = np.fmax(rms[0], rms[1])
    gap = np.fmax(np.abs(rms[0] - rms[1]), np.abs(mean[0] - mean[1]))
    with np.errstate(invalid="ignore", divide="ignore"):
        apart = np.where(gap > 0, gap / size, 0.0)
    bad = [np.isnan(rms[0]), np.isnan(rms[1])]
    apart = np.where(bad[0] & bad[1], 0.0, np.where(bad[0] | bad[1], np.inf, apart))
    counts = [rows[..., (schema.NAN, schema.POS_INF, schema.NEG_INF)] for rows in (one, two)]
    apart = np.where((counts[0] != counts[1]).any(-1), np.inf, apart)
    # Minimum, maximum or zeros may differ where mean and rms are equal to the last bit.
    same = ((one == two) | (np.isnan(one) & np.isnan(two))).all(-1)
    result: Values = np.where(same, 0.0, np.fmax(apart, np.finfo(np.float64).tiny))
    return result


def differences(
    left: Run, right: Run, *, quantities: Sequence[Quantity] = ("parameter", "gradient", "output")
) -> list[Difference]:
    """Return how the sites of two runs differ at their ends, those that differ most first; NaN where not measured."""
    sites = [site for site in common_sites(left, right) if site.quantity in quantities and site.phase == "train"]
    rows = [Difference(site.key, recent_rms(left, site.key), recent_rms(right, site.key)) for site in sites]
    return sorted(rows, key=lambda row: -np.nan_to_num(abs(row.doublings), nan=-1.0))


def recent_rms(run: Run, key: str) -> float:
    """Return the median of the latest root mean squares of a site; NaN where none is finite."""
    start = int(run.steps[-RECENT]) if len(run.steps) > RECENT else None
    values = run.series(key, "rms", start=start).values
    if not len(values):  # recorded less often, to keep within the budget
        values = run.series(key, "rms").values[-RECENT:]
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else float("nan")
