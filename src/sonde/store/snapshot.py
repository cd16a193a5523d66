"""What sites read at one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sonde import schema
from sonde.store import codec, table
from sonde.store.table import Table


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """One reading for each of some sites."""

    site: NDArray[np.int64]
    step: NDArray[np.int64]
    span: NDArray[np.uint32]
    rows: NDArray[np.float64]
    bins: NDArray[np.uint64]
    binned: NDArray[np.bool_]

    @classmethod
    def none(cls) -> Snapshot:
        """Return the snapshot of no site."""
        empty = np.zeros(0, np.int64)
        rows, bins = np.zeros((0, schema.NUM_COLUMNS)), np.zeros((0, schema.NUM_BINS), np.uint64)
        return cls(empty, empty, empty.astype(np.uint32), rows, bins, empty.astype(bool))

    @classmethod
    def of(cls, rows: Table, at: NDArray[np.intp], index: NDArray[np.intp]) -> Snapshot:
        """Take the rows `index`, which belong to the sites `at`."""
        length = rows.hist_len[index]
        counts = table.gather_counts(rows.hist, rows.hist_offset[index], length)
        bins, binned = codec.unpack_bins(rows.hist_lo[index], length, counts)
        stats = np.ascontiguousarray(rows.stats[:, index].T)
        return cls(rows.site[at].astype(np.int64), rows.step[index], rows.span[index], stats, bins, binned)

    @classmethod
    def join(cls, parts: list[Snapshot]) -> Snapshot:
        """Put snapshots one after the other."""
        names = ("site", "step", "span", "rows", "bins", "binned")
        return cls(*(np.concatenate([getattr(part, name) for part in [cls.none(), *parts]]) for name in names))

    def __len__(self) -> int:
        return len(self.site)

    def take(self, index: NDArray[Any]) -> Snapshot:
        """Return the readings that `index` names."""
        names = ("site", "step", "span", "rows", "bins", "binned")
        return Snapshot(*(getattr(self, name)[index] for name in names))

    def update(self, newer: Snapshot) -> Snapshot:
        """Return this snapshot with what a newer one says."""
        if not len(self):
            return newer
        joined = Snapshot.join([self, newer])
        return joined.take(table.last_of_each([joined.site]))

    def merged(self) -> Snapshot:
        """Return the readings of the same site, from several ranks, merged into one."""
        shot = self.take(np.argsort(self.site, kind="stable"))
        if not len(shot):
            return shot
        starts = np.flatnonzero(np.append(True, shot.site[1:] != shot.site[:-1]))
        end = np.maximum.reduceat(shot.step + shot.span, starts)
        step = np.minimum.reduceat(shot.step, starts)
        return Snapshot(
            site=shot.site[starts],
            step=step,
            span=(end - step).astype(np.uint32),
            rows=schema.merge_groups(shot.rows, starts),
            bins=np.add.reduceat(shot.bins, starts, axis=0),
            binned=np.logical_and.reduceat(shot.binned, starts),
        )
