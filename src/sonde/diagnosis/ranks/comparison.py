"""Compare what the ranks of a run recorded: replicas that diverge and why, equal batches, settings that differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from sonde.core import schema
from sonde.core.signals import BATCH_MARK, BUFFER, DIRECT_PASSES, LOOP, REDUCED_PASSES, WEIGHT_BEFORE, part_of
from sonde.errors import SelectionError
from sonde.records import Quantity, Site
from sonde.store import Run
from sonde.store.fingerprints import is_setting
from sonde.store.log.holdings import kind_of, pieces_of
from sonde.store.ranks import read_beats
from sonde.store.series import ALL_COLUMNS, Readings

TOLERANCE: Final = 1e-5
"""Difference over the size of a tensor: ranks may round a mean differently, but by less."""
MAX_PARAMETERS: Final = 64
"""How many parameters are compared: copies that part do so everywhere."""
MAX_RANKS: Final = 64
"""How many ranks are compared, evenly chosen."""
MAX_GRADIENTS: Final = 8
LEAST_BATCHES: Final = 3
"""How many batches must be equal on all ranks, and all that are known."""
AVERAGED: Final = 2
"""How often ranks that had parted must have been alike again: a broadcast at the start is one time."""
_BEFORE: Final = part_of(WEIGHT_BEFORE)

Cause = Literal[
    "start",
    "setting",
    "skipped",
    "twice",
    "around",
    "no_sync",
    "not_reduced",
    "not_covered",
    "changed",
    "data",
    "randomness",
    "state",
    "written",
    "unknown",
]


@dataclass(frozen=True, slots=True)
class Drift:
    """A parameter or buffer that is not the same on all ranks that hold a copy."""

    name: str
    step: int
    """The first step after which it differed."""
    first: float
    """By how much then, as a part of its size."""
    last: float
    """By how much at the end."""
    ranks: tuple[int, ...]
    """The ranks that left the others; all that were compared if there is no majority."""
    compared: tuple[int, ...] = ()
    """The ranks that hold a copy, as far as they were compared."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting or a count that is not the same on all ranks."""

    name: str
    step: int
    values: dict[int, float]
    """By rank."""


@dataclass(frozen=True, slots=True)
class RankComparison:
    """How the ranks of a run compare."""

    parameters: list[Drift] = field(default_factory=list)
    """Those that differ, the earliest first."""
    cause: Cause = "unknown"
    """Why the parameters differ."""
    buffers: list[Drift] = field(default_factory=list)
    same_batches: int = 0
    """How many batches were equal on all ranks, if all were."""
    settings: list[Difference] = field(default_factory=list)
    step_counts: dict[int, int] = field(default_factory=dict)
    """The last step of each rank, if they ended at different ones."""


@dataclass(frozen=True, slots=True)
class _Stretch:
    """The steps of a run that are compared."""

    run: Run
    start: int | None

    def read(self, site: Site, rank: int) -> Readings:
        """Return what one rank read at a site."""
        return self.run.stored(site, ALL_COLUMNS, bins=False, rank=rank, start=self.start)


def compare_ranks(run: Run, *, start: int | None = None) -> RankComparison | None:
    """Compare the ranks of a run from a step on; None if fewer than two recorded anything."""
    if len(run.ranks) < 2:
        return None
    stretch = _Stretch(run, start)
    groups = _copies(run, run.sites, "parameter")
    parameters = [] if _are_averaged(stretch) else _drifts(stretch, groups[:: max(1, len(groups) // MAX_PARAMETERS)])
    buffers = [site for site in run.sites if site.part == part_of(BUFFER)]
    settings = _settings(stretch)
    return RankComparison(
        parameters=parameters,
        cause=_Causes(stretch, parameters[0], settings).find() if parameters else "unknown",
        buffers=_drifts(stretch, _copies(run, buffers, "vital")),
        same_batches=_same_batches(_Stretch(run, None)),
        settings=settings,
        step_counts=_step_counts(run),
    )


def _copies(run: Run, sites: Iterable[Site], quantity: Quantity) -> list[tuple[Site, list[int]]]:
    """Return the sites of a quantity with the ranks that hold copies of the same elements."""
    found = []
    for site in sites:
        if site.quantity == quantity and site.same_as is None:
            pieces = pieces_of(run.holdings_of(site))
            found += [(site, ranks) for ranks in pieces.values() if len(ranks) > 1]
    return found


# ---------------------------------------------------------------------- copies that part


def _drifts(stretch: _Stretch, groups: Sequence[tuple[Site, list[int]]]) -> list[Drift]:
    found = (_drift(stretch, site, _some(ranks)) for site, ranks in groups)
    return sorted((drift for drift in found if drift is not None), key=lambda drift: drift.step)


def _are_averaged(stretch: _Stretch) -> bool:
    """Return whether the program makes ranks alike again from time to time after they have parted, as Local SGD does.

    Then a weight is the same on all ranks before a step, though it was not after the step before.
    """
    for site, ranks in _copies(stretch.run, [each for each in stretch.run.sites if each.part == _BEFORE], "vital"):
        try:
            after = stretch.run.site(f"{site.name}:parameter")
        except SelectionError:
            continue
        (began, before), (ended, left) = (_common(stretch, each, _some(ranks)) for each in (site, after))
        if not len(before) or not len(left):
            continue
        same = {int(step) for step in began[_spread(before) <= TOLERANCE]}
        parted = {int(step) for step in ended[_spread(left) > TOLERANCE]}
        if len([step for step in same if step - 1 in parted]) >= AVERAGED:
            return True
    return False


def _spread(rows: list[schema.Rows]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.array([_apart(rows[0], row) for row in rows]).max(axis=0)
    return found


def _some(ranks: list[int]) -> list[int]:
    return ranks[:: max(1, -(-len(ranks) // MAX_RANKS))]


def _drift(stretch: _Stretch, site: Site, ranks: list[int]) -> Drift | None:
    """Return how copies of one tensor part; before the first step they may differ, since DDP copies rank 0's weights.

    A value that is not finite anywhere differs by nothing that could be measured.
    """
    steps, rows = _common(stretch, site, ranks)
    if not len(steps):
        return None
    apart = np.array([_apart(rows[0], row) for row in rows])
    differs = np.flatnonzero((apart.max(axis=0) > TOLERANCE) & (steps > 0))
    if not len(differs):
        return None
    at = int(differs[0])
    began = 0 if steps[0] == 0 and apart[:, : at + 1].max(axis=0).min() > TOLERANCE else int(steps[at])
    return Drift(
        site.name,
        began,
        float(apart[:, at].max()),
        float(apart[:, -1].max()),
        _odd_ones(ranks, [row[at] for row in rows]),
        tuple(ranks),
    )


def _common(stretch: _Stretch, site: Site, ranks: Sequence[int]) -> tuple[NDArray[np.int64], list[schema.Rows]]:
    """Return the steps that all ranks have a reading of, and the rows of each rank at these."""
    parts = [stretch.read(site, rank) for rank in ranks]
    steps = parts[0].step
    for part in parts[1:]:
        steps = np.intersect1d(steps, part.step)
    rows = [part.rows[np.searchsorted(part.step, steps)] for part in parts]
    if any((row[:, schema.COUNT] != rows[0][:, schema.COUNT]).any() for row in rows):
        return steps[:0], []
    return steps, rows


def _apart(left: schema.Rows, right: schema.Rows) -> NDArray[np.float64]:
    """Return the largest difference between two rows over their size."""
    size = np.maximum(np.maximum(np.abs(left[..., schema.MIN]), np.abs(left[..., schema.MAX])), 1e-30)
    columns = [schema.MIN, schema.MAX, schema.MEAN]
    distance: NDArray[np.float64] = np.abs(left[..., columns] - right[..., columns]).max(-1) / size
    return distance


def _odd_ones(ranks: list[int], rows: list[schema.Rows]) -> tuple[int, ...]:
    """Return the ranks that are not in the largest group of equal ones; all if no group is larger than the others."""
    groups: list[list[int]] = []
    for number, row in enumerate(rows):
        group = next((each for each in groups if _apart(rows[each[0]], row) <= TOLERANCE), None)
        if group is None:
            groups.append([number])
        else:
            group.append(number)
    groups.sort(key=len, reverse=True)
    if len(groups) > 1 and len(groups[0]) == len(groups[1]):
        return tuple(ranks)
    return tuple(sorted(ranks[number] for group in groups[1:] for number in group))


# ---------------------------------------------------------------------- why they part


class _Causes:
    """Tells the causes of a parting apart, from exact relations between what two ranks recorded."""

    def __init__(self, stretch: _Stretch, drift: Drift, settings: list[Difference]) -> None:
        self._run, self._read = stretch.run, stretch.read
        self._drift, self._settings = drift, settings
        odd = drift.ranks[-1]
        self._ranks = (next(rank for rank in drift.compared if rank != odd), odd)
        """One that stayed, and one that left."""
        self._at = max(1, drift.step)
        names = [site.name for site in self._run.sites if site.quantity == "gradient"]
        chosen = dict.fromkeys([drift.name, *names[:: max(1, len(names) // MAX_GRADIENTS)]])
        self._gradients = [pair for name in chosen if (pair := self._both(f"{name}:gradient")) is not None]

    def find(self) -> Cause:
        if any(each.step <= self._at for each in self._settings):
            return "setting"
        if self._skips():
            return "skipped"
        same = self._same_gradients(0)
        if same is None:
            return "start" if self._drift.step == 0 else "unknown"
        if not same:
            return self._shifted() or self._why_not_reduced()
        if self._drift.step == 0:
            return "start"
        updates = self._both(f"{self._drift.name}:update")
        equal = None if updates is None else _equal(updates, self._at, self._at)
        return "unknown" if equal is None else "written" if equal else "state"

    def _both(self, key: str) -> tuple[Readings, Readings] | None:
        """Return the readings of the two ranks, if both hold a copy."""
        try:
            site = self._run.site(key)
        except SelectionError:
            return None
        holdings = self._run.holdings_of(site)
        if len({holdings.get(rank) for rank in self._ranks}) > 1:
            return None
        left, right = (self._read(site, rank) for rank in self._ranks)
        return left, right

    def _same_gradients(self, shift: int) -> bool | None:
        """Return whether the second rank's gradients are those of the first, `shift` steps later; None if unknown."""
        found = [equal for pair in self._gradients if (equal := _equal(pair, self._at + shift, self._at)) is not None]
        return all(found) if found else None

    def _shifted(self) -> Cause | None:
        """Return whether a rank is a step ahead or behind: reduced gradients of a pass are the same on all ranks."""
        behind, ahead = self._same_gradients(1), self._matches_next()
        if behind:
            return "twice" if self._repeats(0) else "skipped"
        if ahead:
            return "twice" if self._repeats(1) else "skipped"
        return None

    def _matches_next(self) -> bool:
        """Return whether the first rank's gradients are those that the second has a step later."""
        found = [equal for pair in self._gradients if (equal := _equal(pair, self._at, self._at + 1)) is not None]
        return bool(found) and all(found)

    def _repeats(self, which: int) -> bool:
        """Return whether a rank used the same gradients in this step as in the one before."""
        found = [
            equal
            for pair in self._gradients
            if (equal := _equal((pair[which], pair[which]), self._at, self._at - 1)) is not None
        ]
        return bool(found) and all(found)

    def _skips(self) -> bool:
        blocks = [self._run.blocks_of(rank) for rank in self._ranks]
        skipped = [set(each.step[each.skipped].tolist()) for each in blocks]
        return any(step <= self._at for step in skipped[0] ^ skipped[1])

    def _why_not_reduced(self) -> Cause:
        if self._passes(DIRECT_PASSES):
            return "around"
        reduced = self._passes(REDUCED_PASSES)
        if reduced == 0:
            return "no_sync"
        if reduced:
            some = [_equal(pair, self._at, self._at) for pair in self._gradients]
            return "not_covered" if any(some) else "changed"
        return self._in_one_group() or "not_reduced"

    def _passes(self, signal: str) -> float | None:
        """Return the largest count of passes of a kind in the step, of the two ranks; None if it was not measured."""
        found = []
        for rank in self._ranks:
            readings = self._of(f"{LOOP}:vital{part_of(signal)}", rank)
            if readings is not None:
                found += readings.rows[readings.step == self._at, schema.MEAN].tolist()
        # Going around is seen on the rank that does it; a reduction needs all ranks.
        return (max(found) if signal == DIRECT_PASSES else min(found)) if found else None

    def _of(self, key: str, rank: int) -> Readings | None:
        try:
            return self._read(self._run.site(key), rank)
        except SelectionError:
            return None

    def _in_one_group(self) -> Cause | None:
        """Return what differs between ranks that are meant to work on the same samples, as in tensor parallelism."""
        inputs = [site for site in self._run.sites if site.quantity == "input" and site.phase == "train"]
        pairs = [
            (
                self._read(site, a),
                self._read(site, b),
            )
            for site in inputs
            if kind_of(site.placement) == "data"
            for a, b in [self._ranks]
            if self._run.holdings_of(site).get(a) == self._run.holdings_of(site).get(b)
        ]
        equal = [each for pair in pairs if (each := _equal(pair, self._at, self._at)) is not None]
        return None if not equal else "randomness" if all(equal) else "data"


def _equal(pair: tuple[Readings, Readings], left_step: int, right_step: int) -> bool | None:
    """Return whether two ranks' readings agree at two steps; None if one of them has none there."""
    left, right = (each.rows[each.step == step] for each, step in zip(pair, (left_step, right_step), strict=True))
    if not len(left) or not len(right):
        return None
    return bool(_apart(left[0], right[0]) <= TOLERANCE)


# ---------------------------------------------------------------------- batches, settings, steps


def _same_batches(stretch: _Stretch) -> int:
    """Return how many batches were the same on all ranks, if all that are known were."""
    part, run = part_of(BATCH_MARK), stretch.run
    for site in run.sites:
        if site.quantity == "vital" and site.part == part and site.phase == "train":
            ranks = _with_data_of_their_own(run, site)
            steps, rows = _common(stretch, site, ranks) if len(ranks) > 1 else (np.zeros(0, np.int64), [])
            marks = np.array([row[:, schema.MEAN] for row in rows])
            if len(steps) >= LEAST_BATCHES and (marks == marks[0]).all():
                return len(steps)
    return 0


def _with_data_of_their_own(run: Run, mark: Site) -> list[int]:
    """Return one rank of each group that works on samples of its own."""
    groups = next(
        (run.holdings_of(site) for site in run.sites if site.quantity == "input" and site.name == mark.name), {}
    )
    stages = {rank for site in run.sites for rank, text in run.holdings_of(site).items() if kind_of(text) == "stage"}
    ranks = {groups.get(rank, str(rank)): rank for rank in reversed(run.ranks_of(mark)) if rank not in stages}
    return _some(sorted(ranks.values()))


def _settings(stretch: _Stretch) -> list[Difference]:
    """Return learning rates, loss scales and the like that are not the same on all ranks, the earliest first."""
    found = []
    for site in stretch.run.sites:
        if not is_setting(site):
            continue
        ranks = _some(stretch.run.ranks_of(site))
        steps, rows = _common(stretch, site, ranks) if len(ranks) > 1 else (np.zeros(0, np.int64), [])
        values = np.array([row[:, schema.MEAN] for row in rows])
        differs = np.flatnonzero((values != values[:1]).any(axis=0)) if len(steps) else np.zeros(0, np.intp)
        if len(differs):
            at = differs[0]
            found.append(Difference(site.name, int(steps[at]), dict(zip(ranks, values[:, at].tolist(), strict=True))))
    return sorted(found, key=lambda each: each.step)


def _step_counts(run: Run) -> dict[int, int]:
    """Return the last step of each rank of a run that is over, by their heartbeats, if they differ.

    The last step that was recorded may be an earlier one, to keep within the budget.
    """
    beats = read_beats(run.path, run.ranks)
    if len(beats) < len(run.ranks) or any(beat.state != "finished" for beat in beats.values()):
        return {}
    found = {rank: beat.step for rank, beat in beats.items()}
    return found if len(set(found.values())) > 1 else {}
