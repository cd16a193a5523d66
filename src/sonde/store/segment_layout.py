"""What a segment must look like inside: its tensors, their types and shapes, and the order of what they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde import schema
from sonde.errors import RunDamaged
from sonde.store.segment_header import Extent
from sonde.store.slice_checks import NUM_SLICES
from sonde.store.table import Blocks, Table

BLOCK_COLUMNS: Final = ("step", "time", "epoch", "skipped", "span")
"""What is told of each block; the tensors are called so with `block_` before."""
SMALL: Final = {
    "site": "<u4",
    "offset": "<u8",
    "slice_crc": "<u4",
    "block_step": "<i8",
    "block_time": "<f8",
    "block_epoch": "<i8",
    "block_skipped": "|b1",
    "block_span": "<u4",
}
LARGE: Final = {"step": "<i8", "span": "<u4", "stats": "<f8"}
HISTOGRAMS: Final = {"hist_lo": "|u1", "hist_len": "|u1", "hist_offset": "<u8"}
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
        dtype = {**SMALL, **LARGE, **HISTOGRAMS, "merged": "<u4"}[name]
        if found is None or found.shape != shape or found.dtype != dtype:
            what = "is missing" if found is None else f"is {found.dtype}{list(found.shape)}"
            raise RunDamaged(f"{path}: the tensor {name!r} {what}; it should be {dtype}{list(shape)}.")
    if "hist" in extents and (len(extents["hist"].shape) != 1 or extents["hist"].dtype[1] != "u"):
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
    """Say what contradicts itself in rows whose bytes are what was written."""
    try:
        if has_hist:
            check_offsets(path, rows, 0, len(rows))
    except RunDamaged as error:
        return [str(error)]
    falling = rows.step[1:] <= rows.step[:-1]
    boundaries = rows.offset[1:-1].astype(np.intp) - 1
    falling[boundaries[(boundaries >= 0) & (boundaries < len(falling))]] = False
    return [f"{path}: the steps of a site are not in rising order"] if falling.any() else []
