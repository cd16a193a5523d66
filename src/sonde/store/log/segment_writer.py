"""Writing segments: sealed files that any safetensors library reads.

What Sonde adds is in `__metadata__`, and every byte is covered by a checksum: the header by `check`, each tensor by an
entry of `crc32`, and each site's slice of each column by `slice_crc`, so that one series can be read and checked
without touching the rest.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde import schema, strict_json
from sonde.records import Site
from sonde.replacing import sync_folder
from sonde.store import sealed
from sonde.store.log import sites
from sonde.store.log.attempts import Attempt
from sonde.store.log.segment_checks import slice_crcs
from sonde.store.log.table import Table
from sonde.store.sealed import raw, write_all

# At most as long as safetensors itself allows.
FORMAT: Final = sealed.Format("sonde-segment", "segment of a Sonde run", schema.SCHEMA_VERSION, 100 << 20)
DTYPES: Final = {"F64": "<f8", "I64": "<i8", "U64": "<u8", "U32": "<u4", "U8": "|u1", "BOOL": "|b1"}
"""The types of a segment's tensors: what safetensors and numpy call them."""
_NAMES: Final = {np.dtype(numpy): name for name, numpy in DTYPES.items()}


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
        origin: What it says about that.
        may_finish: Asked at the very end; if it says no, nothing is left behind.

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
        "attempts": strict_json.dumps([attempt.to_json() for attempt in origin.attempts]).decode(),
        "sites": strict_json.dumps(sites.to_json(origin.sites)).decode(),
        "crc32": strict_json.dumps({name: zlib.crc32(raw(tensor)) for name, tensor in tensors.items()}).decode(),
    }
    entries = []
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.nbytes
        entries.append(sealed.entry(name, _NAMES[tensor.dtype], tensor.shape, at, end))
        at = end
    return sealed.render(sealed.open_metadata(metadata), entries)
