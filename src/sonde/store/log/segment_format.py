"""The format of segments: sealed files that any safetensors library reads.

What Sonde adds is in `__metadata__`, and every byte is covered by a checksum: the header by `check`, each tensor by an
entry of `crc32`, and each site's slice of each column by `slice_crc`, so that one series can be read and checked
without touching the rest.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.core import files, schema
from sonde.core.files import sync_folder
from sonde.errors import RunDamaged
from sonde.records import Site
from sonde.store import sealed
from sonde.store.log import sites
from sonde.store.log.attempts import Attempt
from sonde.store.log.table import Blocks, Table
from sonde.store.sealed import Extent, raw, write_all

# At most as long as safetensors itself allows.
FORMAT: Final = sealed.Format("sonde-segment", "segment of a Sonde run", schema.SCHEMA_VERSION, 100 << 20)
DTYPES: Final = {"F64": "<f8", "I64": "<i8", "U64": "<u8", "U32": "<u4", "U8": "|u1", "BOOL": "|b1"}
"""The types of a segment's tensors: what safetensors and numpy call them."""
_NAMES: Final = {np.dtype(numpy): name for name, numpy in DTYPES.items()}


BLOCK_COLUMNS: Final = ("step", "time", "epoch", "skipped", "span")
"""The columns of blocks; their tensors have these names after `block_`."""
SMALL: Final = {
    "site": "U32",
    "offset": "U64",
    "slice_crc": "U32",
    "block_step": "I64",
    "block_time": "F64",
    "block_epoch": "I64",
    "block_skipped": "BOOL",
    "block_span": "U32",
}
LARGE: Final = {"step": "I64", "span": "U32", "stats": "F64"}
HISTOGRAMS: Final = {"hist_lo": "U8", "hist_len": "U8", "hist_offset": "U64"}
GROWING: Final = (*LARGE, "merged", *HISTOGRAMS, "hist")
"""The tensors that grow with the rows. `merged` and those of histograms may be absent."""


def check_shapes(path: Path, extents: dict[str, Extent], num_sites: int, num_blocks: int) -> None:
    """Raise RunDamaged unless all tensors are there, of the right types and as long as each other."""
    rows = extents["step"].shape[0] if "step" in extents and extents["step"].shape else 0
    expected: dict[str, tuple[int, ...]] = {
        "site": (num_sites,),
        "offset": (num_sites + 1,),
        "slice_crc": (NUM_SLICES, num_sites),
        "step": (rows,),
        "span": (rows,),
        "stats": (schema.NUM_COLUMNS, rows),
        **{f"block_{name}": (num_blocks,) for name in BLOCK_COLUMNS},
    }
    if "merged" in extents:
        expected["merged"] = (rows,)
    if "hist" in extents:
        expected |= {"hist_lo": (rows,), "hist_len": (rows,), "hist_offset": (rows + 1,)}
    for name, shape in expected.items():
        found = extents.get(name)
        dtype = {**SMALL, **LARGE, **HISTOGRAMS, "merged": "U32"}[name]
        if found is None or found.shape != shape or found.dtype != dtype:
            what = "is missing" if found is None else f"is {found.dtype}{list(found.shape)}"
            raise RunDamaged(f"{path}: the tensor {name!r} {what}; it should be {dtype}{list(shape)}.")
    if "hist" in extents and (len(extents["hist"].shape) != 1 or extents["hist"].dtype not in ("U32", "U64")):
        raise RunDamaged(f"{path}: the tensor 'hist' is not a list of counts.")


def check_order(
    path: Path, site: NDArray[np.uint32], offset: NDArray[np.uint64], blocks: Blocks, num_rows: int
) -> None:
    """Raise RunDamaged unless sites, their rows and blocks are in rising order."""
    rising = bool((offset[1:] >= offset[:-1]).all()) and int(offset[0]) == 0 and int(offset[-1]) == num_rows
    if not rising or not bool((site[1:] > site[:-1]).all()):
        raise RunDamaged(f"{path}: its sites or their offsets are not in rising order.")
    if not bool((blocks.step[1:] > blocks.step[:-1]).all()):
        raise RunDamaged(f"{path}: its blocks are not in rising order.")


def check_offsets(path: Path, rows: Table, first: int, last: int) -> None:
    """Raise RunDamaged unless the histograms of these rows lie where histograms are, one after the other."""
    offsets = rows.hist_offset[first : last + 1]
    lengths = rows.hist_len[first:last]
    # Checked before any use as a bound: an offset may point anywhere.
    good = int(offsets[-1]) <= len(rows.hist) and bool((offsets[1:] - offsets[:-1] == lengths).all())
    if not good or bool((rows.hist_lo[first:last].astype(np.uint16) + lengths > schema.NUM_BINS).any()):
        raise RunDamaged(f"{path}: the histograms of rows {first} to {last} make no sense.")


def inconsistencies(path: Path, rows: Table, *, has_hist: bool) -> list[str]:
    """Return the contradictions in rows whose checksums are right."""
    try:
        if has_hist:
            check_offsets(path, rows, 0, len(rows))
    except RunDamaged as error:
        return [str(error)]
    falling = rows.step[1:] <= rows.step[:-1]
    boundaries = rows.offset[1:-1].astype(np.intp) - 1
    falling[boundaries[(boundaries >= 0) & (boundaries < len(falling))]] = False
    return [f"{path}: the steps of a site are not in rising order"] if falling.any() else []


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where the rows of a segment come from."""

    sites: list[Site]
    attempts: list[Attempt]
    window: int = 1
    """How many steps thinning has put together in a row, at most."""


def write_segment(path: Path, rows: Table, origin: Origin, *, may_finish: Callable[[], bool] = lambda: True) -> bool:
    """Write a segment in one step, through a file beside it.

    Args:
        path: Where it belongs.
        rows: What it holds.
        origin: The sites, attempts and window to describe in its header.
        may_finish: Called at the very end; if it returns False, nothing is left behind.

    Returns:
        Whether the segment was put in its place.

    """
    tensors = _tensors(rows)
    head = _build_header(tensors, rows, origin)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb", buffering=0) as file:
            write_all(file.fileno(), head)
            for tensor in tensors.values():
                write_all(file.fileno(), raw(tensor))
            os.fsync(file.fileno())
        if not may_finish():
            temporary.unlink(missing_ok=True)
            return False
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return True


def _tensors(rows: Table) -> dict[str, NDArray[Any]]:
    named: dict[str, NDArray[Any]] = {
        "stats": rows.stats,
        "step": rows.step,
        "offset": rows.offset,
        "block_step": rows.blocks.step,
        "block_time": rows.blocks.time,
        "block_epoch": rows.blocks.epoch,
        "span": rows.span,
        "site": rows.site,
        "slice_crc": slice_crcs(rows),
        "block_span": rows.blocks.span,
        "block_skipped": rows.blocks.skipped,
    }
    if (rows.merged != 1).any():
        named["merged"] = rows.merged
    if rows.hist_len.any():
        named |= {
            "hist_offset": rows.hist_offset,
            "hist": rows.hist,
            "hist_lo": rows.hist_lo,
            "hist_len": rows.hist_len,
        }
    little = {name: np.ascontiguousarray(a, dtype=a.dtype.newbyteorder("<")) for name, a in named.items()}
    # Widest items first: the format allows no holes, and this way every array starts where its items align.
    return dict(sorted(little.items(), key=lambda item: -item[1].itemsize))


def _build_header(tensors: dict[str, NDArray[Any]], rows: Table, origin: Origin) -> bytes:
    """Return the header of a file that holds these tensors in this order."""
    steps = rows.blocks.step
    metadata = {
        "format": FORMAT.name,
        "schema_version": str(schema.SCHEMA_VERSION),
        "columns": ",".join(schema.COLUMNS),
        "window": str(origin.window),
        "first_step": str(int(steps[0])) if len(steps) else "",
        "last_step": str(int(steps[-1])) if len(steps) else "",
        "attempts": files.dumps([attempt.to_json() for attempt in origin.attempts]).decode(),
        "sites": files.dumps(sites.to_json(origin.sites)).decode(),
        "crc32": files.dumps({name: zlib.crc32(raw(tensor)) for name, tensor in tensors.items()}).decode(),
    }
    entries = []
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.nbytes
        entries.append(sealed.entry(name, _NAMES[tensor.dtype], tensor.shape, at, end))
        at = end
    return sealed.render(sealed.open_metadata(metadata), entries)
