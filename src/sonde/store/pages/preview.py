"""Previews: about a kilobyte beside each tensor, so that browsing never opens a page.

A preview holds sixteen statistics of the elements, and for tensors of two dimensions or more a thumbnail: the plane
itself, or a mosaic of the most active of its planes (channels, heads). Levels 0 to 254 run from `low` to `high`; 255 is
an element that is not finite.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.core import schema
from sonde.store.pages import dtypes

STATS: Final = (*schema.COLUMNS, "p01", "p50", "p99", "sampled")
"""A row, three quantiles of an evenly spaced sample of the finite elements, and how many elements that sample has."""

SIDE: Final = 28
TILES: Final = 2  # a mosaic is this many tiles wide and high
RANKED: Final = 16
SAMPLE: Final = 4096
NOT_FINITE: Final = 255

_STRETCH: Final = 8 << 10
_PIECE: Final = 32 << 10  # elements; a piece and its float64 copy stay in the cache
_MAX_POOLED: Final = 512  # rows and columns; beyond, lines are skipped before the rest is averaged
_FIXED: Final = struct.Struct(f"<{len(STATS)}d2dBBHHH")
MAX_BYTES: Final = _FIXED.size + 4 * RANKED + SIDE * SIDE


@dataclass(frozen=True, slots=True, eq=False)
class Preview:
    """What can be seen of a tensor without reading it."""

    shape: tuple[int, ...]
    dtype: str
    stats: dict[str, float]
    """By name (see `STATS`); empty if the elements are not numbers."""
    thumbnail: NDArray[np.uint8] | None = None
    low: float = math.nan
    high: float = math.nan
    channels: tuple[int, ...] = ()
    """The planes of a tensor of three dimensions or more, most active (largest mean magnitude) first; the first of them
    make up the thumbnail, row by row."""
    num_tiles: int = 0

    @property
    def nbytes(self) -> int:
        """How much it takes on disk."""
        return len(pack(self))


def measure(array: NDArray[Any]) -> Preview:
    """Return the preview of an array."""
    described = dtypes.describe(array.dtype)
    dtype = described if isinstance(described, str) else str(array.dtype)
    if not dtypes.is_numeric(array.dtype):
        return Preview(array.shape, dtype, {})
    if array.dtype.kind == "c" or "complex" in array.dtype.name:
        array = np.abs(array)
    with np.errstate(all="ignore"):
        stats = dict(zip(STATS, _statistics(array.reshape(-1)), strict=True))
        picture = _Picture.of(_planes(array)) if array.ndim >= 2 and array.size else None
    if picture is None:
        return Preview(array.shape, dtype, stats)
    return Preview(
        array.shape, dtype, stats, picture.levels, picture.low, picture.high, picture.channels, picture.num_tiles
    )


def _statistics(flat: NDArray[Any]) -> list[float]:
    # Two pieces of room, used again and again: fresh memory costs more than the arithmetic.
    room = np.empty((2, min(_PIECE, flat.size)))
    rows = np.array([_row(flat[start : start + _PIECE], room) for start in range(0, flat.size, _PIECE)])
    row = _merge(rows) if len(rows) else np.zeros(schema.NUM_COLUMNS)
    row[schema.SEEN] = 1
    return [*row.tolist(), *_quantiles(flat)]


def _merge(rows: schema.Rows) -> schema.Rows:
    """Merge all rows at once; `schema.merge_rows`, two by two, would take as long as the measuring."""
    merged: schema.Rows = rows.sum(0)
    finite = schema.finite(rows)
    total = finite.sum()
    has = finite > 0
    if total:
        mean = (finite * rows[:, schema.MEAN]).sum() / total
        merged[schema.M2] += (finite * (rows[:, schema.MEAN] - mean) ** 2).sum()
        merged[schema.MEAN] = mean
        merged[schema.MIN], merged[schema.MAX] = rows[has, schema.MIN].min(), rows[has, schema.MAX].max()
    return merged


def _row(piece: NDArray[Any], room: NDArray[np.float64]) -> schema.Rows:
    row = np.zeros(schema.NUM_COLUMNS)
    row[schema.COUNT] = piece.size
    values, spare = room[:, : piece.size]
    np.copyto(values, piece, casting="unsafe")
    low, high = values.min(), values.max()
    if not (math.isfinite(low) and math.isfinite(high)):
        row[schema.NAN] = np.count_nonzero(np.isnan(values))
        row[schema.POS_INF], row[schema.NEG_INF] = (np.count_nonzero(values == sign) for sign in (np.inf, -np.inf))
        values = values[np.isfinite(values)]
        if not values.size:
            return row
        spare = spare[: values.size]
        low, high = values.min(), values.max()
    total = values.sum()
    mean = total / values.size
    row[schema.MIN], row[schema.MAX], row[schema.MEAN] = low, high, mean
    np.subtract(values, mean, out=spare)
    row[schema.M2] = _square_sum(spare)
    if low <= 0 <= high:
        row[schema.ZERO] = np.count_nonzero(values == 0)
    if low < 0:
        np.abs(values, out=values)
        total = values.sum()
    row[schema.ABS_SUM] = total
    if high >= 1 or low <= -1:
        row[schema.GE_ONE] = np.count_nonzero(values >= 1)
    return row


def _square_sum(values: NDArray[np.float64]) -> float:
    # In short stretches: for longer ones numpy's library would start threads of its own.
    return sum(
        float(np.dot(part, part)) for part in (values[at : at + _STRETCH] for at in range(0, len(values), _STRETCH))
    )


def _quantiles(flat: NDArray[Any]) -> list[float]:
    stride = -(-flat.size // SAMPLE) or 1
    sample = flat[::stride].astype(np.float64)
    sample = np.sort(sample[np.isfinite(sample)])
    last = sample.size - 1
    if last < 0:
        return [math.nan, math.nan, math.nan, 0.0]
    return [*(float(sample[round(q * last)]) for q in (0.01, 0.5, 0.99)), float(sample.size)]


def _planes(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array as a list of planes; leading dimensions are laid end to end."""
    return array.reshape(-1, *array.shape[-2:])


@dataclass(frozen=True, slots=True)
class _Picture:
    levels: NDArray[np.uint8]
    low: float
    high: float
    channels: tuple[int, ...]
    num_tiles: int

    @classmethod
    def of(cls, planes: NDArray[Any]) -> _Picture:
        if len(planes) == 1:
            whole = _shrink(planes[0], SIDE)
            return cls(*_levels(whole), (), 1)
        channels = _rank(planes)
        side = SIDE // TILES
        tiles = [_shrink(planes[channel], side) for channel in channels[: TILES * TILES]]
        high, wide = tiles[0].shape
        mosaic = np.full((-(-len(tiles) // TILES) * high, min(len(tiles), TILES) * wide), np.nan)
        for at, tile in enumerate(tiles):
            top, left = at // TILES * high, at % TILES * wide
            mosaic[top : top + high, left : left + wide] = tile
        return cls(*_levels(mosaic), tuple(channels), len(tiles))


def _rank(planes: NDArray[Any]) -> list[int]:
    activity = np.empty(len(planes))
    step = max(1, _PIECE // max(1, planes[0].size))
    # For an order, single precision will do.
    work = np.float64 if planes.dtype.kind in "iu" or planes.dtype.itemsize > 4 else np.float32
    for start in range(0, len(planes), step):
        few = np.abs(planes[start : start + step].astype(work, copy=False)).reshape(-1, planes[0].size)
        sums = few.sum(1)
        if not np.isfinite(sums).all():
            sums = np.where(np.isfinite(few), few, 0).sum(1, dtype=np.float64)
        activity[start : start + step] = sums
    order = np.argsort(-activity, kind="stable")
    return [int(channel) for channel in order[:RANKED]]


def _shrink(plane: NDArray[Any], side: int) -> NDArray[np.float64]:
    """Average a plane down to at most `side` rows and columns."""
    rows, columns = (max(1, -(-length // _MAX_POOLED)) for length in plane.shape)
    small = plane[::rows, ::columns].astype(np.float64)
    for axis in (0, 1):
        length = small.shape[axis]
        if length > side:
            edges = np.arange(side + 1) * length // side
            sums = np.add.reduceat(small, edges[:-1], axis)
            counts = np.diff(edges).reshape((-1, 1) if axis == 0 else (1, -1))
            small = sums / counts
    return small


def _levels(plane: NDArray[np.float64]) -> tuple[NDArray[np.uint8], float, float]:
    finite = np.isfinite(plane)
    if not finite.any():
        return np.full(plane.shape, NOT_FINITE, np.uint8), math.nan, math.nan
    low, high = float(plane[finite].min()), float(plane[finite].max())
    # Halves first: the distance between two finite numbers may be infinite.
    scaled = (plane / 2 - low / 2) / (high / 2 - low / 2) * 254 if high > low else np.zeros(plane.shape)
    levels = np.full(plane.shape, NOT_FINITE, np.uint8)
    levels[finite] = np.clip(np.rint(np.nan_to_num(scaled[finite])), 0, 254).astype(np.uint8)
    return levels, low, high


def pack(preview: Preview) -> bytes:
    """Return a preview as bytes; its shape and type are kept elsewhere."""
    if not preview.stats:
        return b""
    levels = preview.thumbnail
    high, wide = levels.shape if levels is not None else (0, 0)
    channels = np.array(preview.channels, "<u4")
    fixed = _FIXED.pack(
        *preview.stats.values(), preview.low, preview.high, high, wide, len(channels), preview.num_tiles, 0
    )
    return fixed + channels.tobytes() + (levels.tobytes() if levels is not None else b"")


def unpack(content: bytes | memoryview, shape: tuple[int, ...], dtype: str) -> Preview | None:
    """Undo `pack`; None if the lengths do not fit."""
    if not len(content):
        return Preview(shape, dtype, {})
    if len(content) < _FIXED.size:
        return None
    *numbers, low, high, rows, columns, num_channels, num_tiles, _ = _FIXED.unpack_from(content)
    if len(content) != _FIXED.size + 4 * num_channels + rows * columns:
        return None
    channels = np.frombuffer(content, "<u4", num_channels, _FIXED.size)
    levels = np.frombuffer(content, np.uint8, rows * columns, _FIXED.size + 4 * num_channels).reshape(rows, columns)
    stats = dict(zip(STATS, numbers, strict=True))
    return Preview(shape, dtype, stats, levels if levels.size else None, low, high, tuple(channels.tolist()), num_tiles)
