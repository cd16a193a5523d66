"""Checksums of pieces of a segment: each column of each site has one, so that one series can be checked by itself."""

from __future__ import annotations

import zlib
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde import schema
from sonde.store.table import Table

# Rows of `slice_crc` after those of the statistics.
STEP, SPAN, MERGED, HIST_CUT, HIST = range(schema.NUM_COLUMNS, schema.NUM_COLUMNS + 5)
NUM_SLICES: Final = HIST + 1


def slice_crcs(rows: Table) -> NDArray[np.uint32]:
    """Return the checksum of each column of each site."""
    crcs = np.zeros((NUM_SLICES, len(rows.site)), dtype=np.uint32)
    columns = dict(enumerate(rows.stats)) | {STEP: rows.step, SPAN: rows.span, MERGED: rows.merged}
    bounds = rows.offset.tolist()
    for number, column in columns.items():
        whole, width = raw(column), column.itemsize
        crcs[number] = [zlib.crc32(whole[first * width : last * width]) for first, last in pairwise(bounds)]
    if rows.hist_len.any():
        for at, (first, last) in enumerate(pairwise(bounds)):
            crcs[HIST_CUT, at], crcs[HIST, at] = hist_crcs(rows, first, last)
    return crcs


def hist_crcs(rows: Table, first: int, last: int) -> tuple[int, int]:
    """Return the checksums of where the histograms of some rows lie and of their counts."""
    cut = zlib.crc32(raw(rows.hist_len[first:last]), zlib.crc32(raw(rows.hist_lo[first:last])))
    low, high = int(rows.hist_offset[first]), int(rows.hist_offset[last])
    return cut, zlib.crc32(raw(rows.hist[low:high]))


def raw(array: NDArray[Any]) -> memoryview:
    """Return the bytes of an array."""
    # A view with a zero in its shape cannot be cast.
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


def piece_crcs(column: NDArray[Any], first: list[int], last: list[int]) -> NDArray[np.uint32]:
    """Return the checksums of many pieces of a column."""
    if not all(column.strides):  # a constant, of which there is only one in memory
        pieces = [raw(column[begin:end]) for begin, end in zip(first, last, strict=True)]
    else:
        whole, width = raw(column), column.itemsize
        pieces = [whole[begin * width : end * width] for begin, end in zip(first, last, strict=True)]
    return np.fromiter(map(zlib.crc32, pieces), np.uint32, len(pieces))


def column_of(rows: Table, column: int) -> NDArray[Any]:
    """Return a column by the number of its checksum, those of histograms left out."""
    if column < schema.NUM_COLUMNS:
        chosen: NDArray[Any] = rows.stats[column]
        return chosen
    return rows.step if column == STEP else rows.span if column == SPAN else rows.merged
