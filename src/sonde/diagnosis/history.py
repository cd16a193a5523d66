"""What a diagnosis remembers of a run: its first steps, its last steps, and long curves of single numbers.

Memory is bounded whatever the length of the run and the size of the model: the more sites there are, the fewer steps
are kept.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.core import schema
from sonde.core.schema import Rows
from sonde.records import Block, Numbers

HEAD: Final = 24
"""Steps from the beginning that are never dropped: how the run looked at first."""
MAX_RECENT: Final = 256
MIN_RECENT: Final = 24
BUDGET_BYTES: Final = 96 << 20
MAX_POINTS: Final = 4096
"""Points of a long curve; when they are used up, every other one of the older half goes."""
_ROW_BYTES: Final = schema.NUM_COLUMNS * 8
_MOST_WANTED: Final = 64  # kinds of blocks: recorded steps, those with logged numbers only, evaluations
_Places = list[tuple[int, int]]
"""Places in a block, each with its site."""


class Stretch:
    """Rows of consecutive blocks, `[block, site, column]`; a site that was not read has an empty row."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.steps = np.zeros(length, np.int64)
        self.skipped = np.zeros(length, np.bool_)
        self.used = 0
        self.start = 0
        self._rows = np.zeros((length, 0, schema.NUM_COLUMNS))
        self._order: NDArray[np.intp] | None = None

    def put(self, block: Block, capacity: int, length: int) -> None:
        """Take a block into the place of its step, or into a fresh one."""
        if capacity > self._rows.shape[1] or length < self.length:
            self._resize(capacity, min(length, self.length))
        place = self._place_of(block.step)
        self.skipped[place] = self.skipped[place] or block.skipped
        self._rows[place, block.sites] = block.rows

    def holds(self, step: int) -> bool:
        """Return whether the newest place is that of a step."""
        return self.used > 0 and bool(self.steps[(self.start + self.used - 1) % self.length] == step)

    @property
    def nbytes(self) -> int:
        """Bytes in use: what was never written to takes no memory yet."""
        return self.used * self._rows.shape[1] * _ROW_BYTES

    def order(self) -> NDArray[np.intp]:
        """Return the places in order of their steps. Asked for once per site and look, so it is kept."""
        if self._order is None:
            self._order = (self.start + np.arange(self.used)) % self.length
        return self._order

    def rows(self, site: int, places: NDArray[np.intp]) -> Rows:
        """Return the rows of a site in these places; empty where it was not read."""
        if site >= self._rows.shape[1]:
            return np.zeros((len(places), schema.NUM_COLUMNS))
        rows: Rows = self._rows[places, site]
        return rows

    def table(self, sites: NDArray[np.intp], last: int, beside: NDArray[np.intp]) -> tuple[NDArray[np.int64], Rows]:
        """Return the last steps in which any site of `beside` was read, and `[step, site, column]` of the sites.

        Rows are empty where a site was not read. What is read in the same steps has the same steps.
        """
        known = sites < self._rows.shape[1]
        order = self.order()
        read = self._rows[order[:, None], beside[beside < self._rows.shape[1]], schema.SEEN] > 0
        order = order[read.any(axis=1)][-last:]
        rows = np.zeros((len(order), len(sites), schema.NUM_COLUMNS))
        rows[:, known] = self._rows[order[:, None], sites[known]]
        return self.steps[order], rows

    def _place_of(self, step: int) -> int:
        if self.holds(step):
            return (self.start + self.used - 1) % self.length
        self._order = None
        if self.used < self.length:
            place = (self.start + self.used) % self.length
            self.used += 1
        else:
            place = self.start
            self.start = (self.start + 1) % self.length
        self.steps[place], self.skipped[place] = step, False
        self._rows[place] = 0
        return place

    def _resize(self, capacity: int, length: int) -> None:
        kept = self.order()[-length:]
        grown = np.zeros((length, max(capacity, self._rows.shape[1]), schema.NUM_COLUMNS))
        grown[: len(kept), : self._rows.shape[1]] = self._rows[kept]
        steps, skipped = np.zeros(length, np.int64), np.zeros(length, np.bool_)
        steps[: len(kept)], skipped[: len(kept)] = self.steps[kept], self.skipped[kept]
        self._rows, self.steps, self.skipped = grown, steps, skipped
        self.length, self.used, self.start = length, len(kept), 0
        self._order = None


class Curve:
    """One number over the whole run, thinned out as it grows."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: list[float] = []

    def put(self, step: int, value: float) -> None:
        """Take the value of a step; a later value of the same step replaces the earlier."""
        if self.steps and self.steps[-1] == step:
            self.values[-1] = value
            return
        self.extend([step], [value])

    def extend(self, steps: list[int], values: list[float]) -> None:
        """Take the values of later steps."""
        self.steps += steps
        self.values += values
        while len(self.steps) > MAX_POINTS:
            half = MAX_POINTS // 2
            self.steps[:half], self.values[:half] = self.steps[:half:2], self.values[:half:2]


class History:
    """Everything the rules may look back on."""

    def __init__(self) -> None:
        self.head = Stretch(HEAD)
        self.recent = Stretch(MAX_RECENT)
        self.curves: dict[int, Curve] = {}
        self.latest: dict[int, tuple[int, Rows]] = {}
        """By site: its last reading, however long ago, of sites that are read once or seldom."""
        self._kept: set[int] = set()
        self._wanted: dict[tuple[int, int, bytes], tuple[_Places, _Places]] = {}
        self.first_bad: dict[int, int] = {}
        """By site: the first step in which NaN or a positive infinity was read there. Negative infinities are masks."""
        self.first_step: int | None = None
        self.step = 0
        self.num_steps = 0
        self.version = 0
        """Rises with everything that is taken."""
        self._remembered: tuple[int, NDArray[np.int64], NDArray[np.intp]] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the steps that are kept."""
        return self.head.nbytes + self.recent.nbytes

    def follow(self, site: int) -> None:
        """Keep a long curve of a site's mean from now on."""
        self.curves.setdefault(site, Curve())

    def keep(self, site: int) -> None:
        """Keep the last reading of a site permanently."""
        self._kept.add(site)

    def put_numbers(self, numbers: Numbers) -> None:
        """Take many steps of numbers, all of them later than what was taken before."""
        followed, kept = self._wanted_in(numbers.sites)
        if self.head.used < HEAD or int(numbers.steps[0]) <= self.step or len(followed) < len(numbers.sites):
            for block in numbers.blocks():
                self.put(block)
            return
        self.version += 1
        rows = numbers.rows
        bad = (rows[..., schema.NAN] > 0) | (rows[..., schema.POS_INF] > 0)
        for at, which in np.argwhere(bad).tolist() if bad.any() else ():
            self.first_bad.setdefault(int(numbers.sites[which]), int(numbers.steps[at]))
        self.num_steps += len(numbers)
        self.step = int(numbers.steps[-1])
        steps = numbers.steps.tolist()
        for at, site in followed:
            self.curves[site].extend(steps, numbers.values[:, at].tolist())
        for at, site in kept:
            self.latest[site] = (self.step, rows[-1, at].copy())

    @staticmethod
    def _size(sites: NDArray[np.uint32]) -> tuple[int, int]:
        """Return how many sites, and how many steps, there must be room for."""
        # Grow by halves, so that sites that turn up one by one do not move everything each time.
        highest = int(sites[-1]) + 1
        capacity = max(64, 1 << (highest - 1).bit_length())
        return capacity, min(max(BUDGET_BYTES // (capacity * _ROW_BYTES) - HEAD, MIN_RECENT), MAX_RECENT)

    def put(self, block: Block) -> None:
        """Take a block."""
        self.version += 1
        if self.first_step is None:
            self.first_step = block.step
        if not len(block.sites):
            return
        self._note_bad(block)
        self.num_steps += block.step != self.step or self.num_steps == 0
        self.step = block.step
        capacity, length = self._size(block.sites)
        if self.head.used < HEAD or block.step == self.head.steps[(self.head.start + HEAD - 1) % HEAD]:
            self.head.put(block, capacity, HEAD)
        followed, kept = self._wanted_in(block.sites)
        # Steps with nothing but numbers, which have curves, must not push out the few that hold readings of tensors.
        if len(followed) < len(block.sites) or block.skipped or self.recent.holds(block.step):
            self.recent.put(block, capacity, length)
        for at, site in followed:
            self.curves[site].put(block.step, _mean(block.rows[at]))
        for at, site in kept:
            self.latest[site] = (block.step, block.rows[at].copy())

    def _wanted_in(self, sites: NDArray[np.uint32]) -> tuple[_Places, _Places]:
        """Return where the sites are that have a long curve, and those whose last reading is kept."""
        key = (len(self.curves), len(self._kept), sites.tobytes())
        found = self._wanted.get(key)
        if found is None:
            if len(self._wanted) >= _MOST_WANTED:
                self._wanted.clear()
            numbers = list(enumerate(sites.tolist()))
            found = self._wanted[key] = (
                [(at, site) for at, site in numbers if site in self.curves],
                [(at, site) for at, site in numbers if site in self._kept],
            )
        return found

    def _note_bad(self, block: Block) -> None:
        bad = (block.rows[:, schema.NAN] > 0) | (block.rows[:, schema.POS_INF] > 0)
        for site in block.sites[bad].tolist() if bad.any() else ():
            self.first_bad.setdefault(site, block.step)

    def rows(self, site: int) -> tuple[NDArray[np.int64], Rows]:
        """Return steps and rows of a site: those of the first and of the last steps, in order, without empty ones."""
        steps, early = self._steps()
        rows = self.recent.rows(site, self.recent.order())
        if len(early):
            rows = np.concatenate([self.head.rows(site, early), rows])
        read = rows[:, schema.SEEN] > 0
        if not read.any() and site in self.latest:
            step, row = self.latest[site]
            return np.array([step], np.int64), row[None]
        return (steps, rows) if read.all() else (steps[read], rows[read])

    def _steps(self) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
        """Return all steps that are remembered, and the places of those that only the head remembers."""
        if self._remembered is None or self._remembered[0] != self.version:
            recent = self.recent.steps[self.recent.order()]
            places = self.head.order()
            first = self.head.steps[places]
            early = first < (recent[0] if len(recent) else np.inf)
            steps = np.concatenate([first[early], recent])
            steps.flags.writeable = False  # all tracks share them
            self._remembered = (self.version, steps, places[early])
        return self._remembered[1:]

    def skipped_steps(self) -> NDArray[np.int64]:
        """Return those of the last steps in which the optimizer was held back."""
        order = self.recent.order()
        result: NDArray[np.int64] = self.recent.steps[order][self.recent.skipped[order]]
        return result

    def recent_steps(self) -> NDArray[np.int64]:
        """Return the last steps that are remembered, in order."""
        result: NDArray[np.int64] = self.recent.steps[self.recent.order()]
        return result


def _mean(row: Rows) -> float:
    """Return the mean of a row as a number says it: not finite if any element is not."""
    if row[schema.NAN] or (row[schema.POS_INF] and row[schema.NEG_INF]):
        return float("nan")
    if row[schema.POS_INF]:
        return float("inf")
    return float("-inf") if row[schema.NEG_INF] else float(row[schema.MEAN])
