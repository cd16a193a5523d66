"""Encode blocks as bytes: the payload of a block's record, and the compact form of histograms."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.core import schema
from sonde.records import Block, Numbers
from sonde.store import framing
from sonde.store.sealed import raw

_BLOCK: Final = struct.Struct("<dqqIIQQ")  # time, epoch, span, flags, reserved, number of rows, number of counts
NO_EPOCH: Final = -1
MAX_SPAN: Final = 2**32 - 1

_SKIPPED: Final = 1
_WIDE: Final = 2  # counts are u64: at least one needs it

Counts = NDArray[np.uint32] | NDArray[np.uint64]


class Kind(IntEnum):
    """What a record holds."""

    START = 1
    SITES = 2
    BLOCK = 3


class BadPayload(Exception):
    """A payload whose checksum is right but whose content is inconsistent."""


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A block as it is stored: statistics by column, histograms cut to the bins between their first and last count."""

    step: int
    time: float
    epoch: int
    skipped: bool
    span: int
    sites: NDArray[np.uint32]
    stats: NDArray[np.float64]
    hist_lo: NDArray[np.uint8]
    hist_len: NDArray[np.uint8]
    hist: Counts


def pack_bins(
    bins: NDArray[np.uint64], binned: NDArray[np.bool_]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], Counts]:
    """Cut histograms to the bins between the first and the last count, and lay the counts end to end.

    A length of 0 means that there is no histogram; a histogram without a count keeps one bin.
    """
    if not binned.any():
        empty = np.zeros(len(bins), dtype=np.uint8)
        return empty, empty, np.zeros(0, dtype=np.uint32)
    filled = bins != 0
    lo = filled.argmax(1)
    end = schema.NUM_BINS - filled[:, ::-1].argmax(1)
    nothing = ~filled[np.arange(len(bins)), lo]
    lo[nothing], end[nothing] = 0, 1
    length = np.where(binned, end - lo, 0)
    columns = np.arange(schema.NUM_BINS, dtype=np.uint8)
    start = lo.astype(np.uint8)[:, None]
    # Unsigned wrap-around turns two comparisons into one: columns before the start become large.
    inside = (columns - start) < length.astype(np.uint8)[:, None]
    flat = bins[inside]
    narrow = flat.size == 0 or int(flat.max()) < 2**32
    return lo.astype(np.uint8), length.astype(np.uint8), flat.astype(np.uint32) if narrow else flat


def unpack_bins(
    lo: NDArray[np.uint8], length: NDArray[np.uint8], counts: Counts
) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Undo `pack_bins`. The counts of row i follow those of row i - 1."""
    bins = np.zeros((len(lo), schema.NUM_BINS), dtype=np.uint64)
    columns = np.arange(schema.NUM_BINS, dtype=np.uint8)
    bins[(columns - lo[:, None]) < length[:, None]] = counts
    return bins, length > 0


def check_bins(lo: NDArray[np.uint8], length: NDArray[np.uint8], num_counts: int) -> str | None:
    """Return what is wrong with cut histograms, or None."""
    if (lo.astype(np.uint16) + length > schema.NUM_BINS).any():
        return f"a histogram reaches past its {schema.NUM_BINS} bins"
    if int(length.sum(dtype=np.uint64)) != num_counts:
        return f"histograms of {int(length.sum(dtype=np.uint64))} counts, but {num_counts} are stored"
    return None


def pack(block: Block) -> Packed:
    """Bring a block into its stored form."""
    lo, length, hist = pack_bins(block.bins, block.binned)
    return Packed(
        step=block.step,
        time=block.time,
        epoch=NO_EPOCH if block.epoch is None else block.epoch,
        skipped=block.skipped,
        span=block.span,
        sites=np.ascontiguousarray(block.sites, dtype="<u4"),
        stats=np.ascontiguousarray(block.rows.T, dtype="<f8"),
        hist_lo=lo,
        hist_len=length,
        hist=hist,
    )


def unpack(packed: Packed) -> Block:
    """Undo `pack`."""
    bins, binned = unpack_bins(packed.hist_lo, packed.hist_len, packed.hist)
    return Block(
        step=packed.step,
        time=packed.time,
        sites=packed.sites,
        rows=np.ascontiguousarray(packed.stats.T),
        bins=bins,
        binned=binned,
        span=packed.span,
        epoch=None if packed.epoch == NO_EPOCH else packed.epoch,
        skipped=packed.skipped,
    )


def encode_block(sequence: int, packed: Packed) -> bytes:
    """Return the record of one block."""
    wide = packed.hist.dtype.itemsize == 8
    flags = (_SKIPPED if packed.skipped else 0) | (_WIDE if wide else 0)
    num_rows, num_counts = len(packed.sites), len(packed.hist)
    fixed = _BLOCK.pack(packed.time, packed.epoch, packed.span, flags, 0, num_rows, num_counts)
    hist = packed.hist.astype("<u8" if wide else "<u4", copy=False)
    # Widest first: every array starts at a multiple of its item's size.
    arrays = [packed.stats, hist, packed.sites] if wide else [packed.stats, packed.sites, hist]
    parts = [raw(array) for array in (*arrays, packed.hist_lo, packed.hist_len)]
    return framing.encode(Kind.BLOCK, packed.step, sequence, [fixed, *parts])


def encode_numbers(sequence: int, numbers: Numbers) -> bytes:
    """Return the records of many steps of numbers, one after the other: the same as of the block of each."""
    num_rows = len(numbers.sites)
    size = _BLOCK.size + num_rows * (schema.NUM_COLUMNS * 8 + 4 + 2)
    kind = np.dtype(
        [
            ("head", framing.HEADER_TYPE),
            ("time", "<f8"), ("epoch", "<i8"), ("span", "<i8"), ("flags", "<u4"), ("reserved", "<u4"),
            ("num_rows", "<u8"), ("num_counts", "<u8"),
            ("stats", "<f8", (schema.NUM_COLUMNS, num_rows)), ("sites", "<u4", (num_rows,)),
            ("hist", "u1", (2 * num_rows + -size % 8,)),
        ]
    )  # fmt: skip
    records = np.zeros(len(numbers), kind)
    records["time"] = numbers.times
    records["epoch"] = NO_EPOCH if numbers.epoch is None else numbers.epoch
    records["span"] = 1
    records["num_rows"] = num_rows
    records["stats"] = numbers.rows.transpose(0, 2, 1)
    records["sites"] = numbers.sites
    return framing.encode_many(Kind.BLOCK, numbers.steps, sequence, records)


def decode_block(step: int, payload: memoryview) -> Packed:
    """Read a block's payload; the arrays are views of it.

    Raises:
        BadPayload: Its sizes do not fit together.

    """
    if len(payload) < _BLOCK.size:
        raise BadPayload(f"a block of {len(payload)} bytes is too short")
    time, epoch, span, flags, _, num_rows, num_counts = _BLOCK.unpack_from(payload)
    wide = bool(flags & _WIDE)
    width = 8 if wide else 4
    needed = _BLOCK.size + num_rows * (schema.NUM_COLUMNS * 8 + 4 + 2) + num_counts * width
    if needed + (-needed % 8) != len(payload):
        raise BadPayload(f"a block of {num_rows} rows and {num_counts} counts does not fill {len(payload)} bytes")
    at = _BLOCK.size

    def take(dtype: str, count: int) -> NDArray[Any]:
        nonlocal at
        array: NDArray[Any] = np.frombuffer(payload, dtype=dtype, count=count, offset=at)
        at += array.nbytes
        return array

    stats = take("<f8", schema.NUM_COLUMNS * num_rows).reshape(schema.NUM_COLUMNS, num_rows)
    hist = take("<u8", num_counts) if wide else None
    sites = take("<u4", num_rows)
    if hist is None:
        hist = take("<u4", num_counts)
    lo, length = take("u1", num_rows), take("u1", num_rows)
    problem = check_bins(lo, length, num_counts)
    if problem is None and (num_rows > 1 and not (sites[1:] > sites[:-1]).all()):
        problem = "its sites are not in rising order"
    if problem is None and not 1 <= span <= MAX_SPAN:
        problem = f"it spans {span} steps"
    if problem is not None:
        raise BadPayload(f"the block of step {step} makes no sense: {problem}")
    return Packed(step, time, epoch, bool(flags & _SKIPPED), span, sites, stats, lo, length, hist)
