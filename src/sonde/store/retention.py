"""Thinning: when a run outgrows its budget, old steps are merged into windows; nothing is thrown away."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde import schema
from sonde.store import codec
from sonde.store.table import Blocks, Table, starts

MAX_DEFAULT_BYTES: Final = 16 << 30
MIN_BYTES: Final = 1 << 20
_ROWS_AT_ONCE: Final = 1 << 16  # histograms are spread out to 512 bytes a row while they are merged


def default_budget(folder: Path) -> int:
    """Return a tenth of the free space, at most 16 GiB."""
    return max(MIN_BYTES, min(shutil.disk_usage(folder).free // 10, MAX_DEFAULT_BYTES))


def thin(rows: Table, window: int) -> Table:
    """Merge all readings of a site whose steps lie in the same window: `[0, window)`, `[window, 2 * window)`, ...

    All that is merged covers the steps of its window's blocks, so a window reads like one block with a longer span.
    """
    old = rows.blocks
    block_starts = _first_of_each(old.step // window)
    end = np.maximum.reduceat(old.step + old.span, block_starts)
    first = old.step[block_starts]
    blocks = Blocks(
        step=first,
        time=np.maximum.reduceat(old.time, block_starts),
        epoch=old.epoch[block_starts],
        skipped=np.logical_or.reduceat(old.skipped, block_starts),
        span=np.minimum(end - first, codec.MAX_SPAN).astype(np.uint32),
    )
    sites = np.repeat(np.arange(len(rows.site)), np.diff(rows.offset).astype(np.intp))
    key = rows.step // window
    groups = _first_of_each(sites, key)
    lo, length, hist = _merge_bins(rows, groups)
    # Every row came with a block, so its window is among those of the blocks.
    home = np.searchsorted(first // window, key[groups])
    return Table(
        site=rows.site,
        offset=np.searchsorted(groups, rows.offset).astype(np.uint64),
        step=blocks.step[home],
        span=blocks.span[home],
        merged=np.add.reduceat(rows.merged, groups, dtype=np.uint32),
        stats=np.ascontiguousarray(schema.merge_groups(np.ascontiguousarray(rows.stats.T), groups).T),
        hist_lo=lo,
        hist_len=length,
        hist_offset=starts(length),
        hist=hist,
        blocks=blocks,
    )


def _first_of_each(*keys: NDArray[Any]) -> NDArray[np.intp]:
    """Return where a run of equal keys begins."""
    differs = np.ones(len(keys[0]), dtype=bool)
    differs[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return np.flatnonzero(differs)


@dataclass(frozen=True, slots=True)
class _Chunk:
    first: int
    last: int
    groups: NDArray[np.intp]


def _chunks(groups: NDArray[np.intp], num_rows: int) -> list[_Chunk]:
    bounds = np.append(groups, num_rows)
    cuts = np.unique(np.searchsorted(bounds, np.arange(0, num_rows, _ROWS_AT_ONCE)))
    cuts = np.append(cuts[cuts < len(groups)], len(groups))
    pairs = zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)
    return [_Chunk(int(bounds[a]), int(bounds[b]), groups[a:b] - bounds[a]) for a, b in pairs]


def _merge_bins(rows: Table, groups: NDArray[np.intp]) -> tuple[NDArray[np.uint8], NDArray[np.uint8], codec.Counts]:
    """Add up the histograms of each group; where a part has none, the whole has none (as `Reading.merge`)."""
    if not rows.hist_len.any():
        nothing = np.zeros(len(groups), dtype=np.uint8)
        return nothing, nothing, np.zeros(0, dtype=np.uint32)
    lows, lengths = [], []
    counts: list[NDArray[Any]] = []
    for chunk in _chunks(groups, len(rows)):
        cut = slice(chunk.first, chunk.last)
        flat = rows.hist[int(rows.hist_offset[chunk.first]) : int(rows.hist_offset[chunk.last])]
        bins, binned = codec.unpack_bins(rows.hist_lo[cut], rows.hist_len[cut], flat)
        whole = np.logical_and.reduceat(binned, chunk.groups)
        merged = np.add.reduceat(bins, chunk.groups, axis=0)
        low, length, packed = codec.pack_bins(np.where(whole[:, None], merged, 0).astype(np.uint64), whole)
        lows.append(low)
        lengths.append(length)
        counts.append(packed)
    joined: codec.Counts = np.concatenate(counts)
    return np.concatenate(lows), np.concatenate(lengths), joined
