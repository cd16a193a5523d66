"""The header of a segment: which tensors the file holds and where, and what Sonde adds in `__metadata__`."""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from sonde import schema, strict_json
from sonde.errors import RunDamaged
from sonde.records import Site
from sonde.store import checked_header, sites
from sonde.store.attempts import Attempt
from sonde.store.slice_checks import raw
from sonde.store.table import Table

FORMAT: Final = "sonde-segment"
MAX_HEADER_BYTES: Final = 100 << 20  # what safetensors itself allows

_DTYPES: Final = {"F64": "<f8", "I64": "<i8", "U64": "<u8", "U32": "<u4", "U8": "|u1", "BOOL": "|b1"}
_NAMES: Final = {np.dtype(numpy): name for name, numpy in _DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where the rows of a segment come from."""

    sites: list[Site]
    attempts: list[Attempt]
    window: int = 1
    """How many steps thinning has put together in a row, at most."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a tensor lies in its file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    crc: int


def build(tensors: dict[str, NDArray[Any]], rows: Table, origin: Origin) -> bytes:
    """Return the header of a file that holds these tensors in this order."""
    steps = rows.blocks.step
    metadata = {
        "check": checked_header.BLANK,
        "format": FORMAT,
        "schema_version": str(schema.SCHEMA_VERSION),
        "columns": ",".join(schema.COLUMNS),
        "window": str(origin.window),
        "first_step": str(int(steps[0])) if len(steps) else "",
        "last_step": str(int(steps[-1])) if len(steps) else "",
        "attempts": strict_json.dumps([attempt.to_json() for attempt in origin.attempts]).decode(),
        "sites": strict_json.dumps(sites.to_json(origin.sites)).decode(),
        "crc32": strict_json.dumps({name: zlib.crc32(raw(tensor)) for name, tensor in tensors.items()}).decode(),
    }
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return checked_header.fill_in_check(text)


def read(path: Path, file: BinaryIO, size: int) -> tuple[dict[str, Extent], dict[str, str]]:
    """Return where each tensor of a file of so many bytes lies, and the metadata.

    Raises:
        RunDamaged: It is not what was written, or makes no sense.

    """
    header, start = checked_header.read(path, file, size, what="segment", max_bytes=MAX_HEADER_BYTES)
    plain = strict_json.loads(header, f"{path}: its header")
    metadata = plain.pop("__metadata__", None) if isinstance(plain, dict) else None
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise RunDamaged(f"{path} is not a segment of a Sonde run.")
    version = parse_int(metadata, "schema_version", path)
    if not 1 <= version <= schema.SCHEMA_VERSION:
        raise RunDamaged(
            f"{path} has schema version {version}; this Sonde reads 1 to {schema.SCHEMA_VERSION}. Update it."
        )
    crcs = strict_json.loads(metadata.get("crc32", "").encode(), f"{path}: crc32")
    if not isinstance(crcs, dict):
        raise RunDamaged(f"{path}: its checksums are no object.")
    extents = {name: _parse_extent(path, name, entry, start, size, crcs.get(name)) for name, entry in plain.items()}
    checked_header.check_no_holes(path, [(each.start, each.end) for each in extents.values()], start, size)
    return extents, metadata


def _parse_extent(path: Path, name: str, entry: Any, start: int, size: int, crc: Any) -> Extent:
    dtype, shape, first, last = "", (), 0, 0
    try:
        dtype, shape, (first, last) = _DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        sane = all(type(n) is int and n >= 0 for n in (*shape, first, last, crc))
        good = sane and math.prod(shape) * np.dtype(dtype).itemsize == last - first and start + last <= size
    except (KeyError, TypeError, ValueError):
        good = False
    if not good:
        raise RunDamaged(f"{path}: its header describes the tensor {name!r} as {entry!r:.150}, which cannot be.")
    return Extent(dtype, shape, start + first, start + last, crc)


def parse_int(metadata: dict[str, str], name: str, path: Path) -> int:
    """Return a number of the metadata, not negative."""
    text = metadata.get(name)
    if not isinstance(text, str) or not text.isdecimal() or len(text) > 18:
        raise RunDamaged(f"{path}: {name} is {text!r:.50}, not a number.")
    return int(text)


def parse_sites(metadata: dict[str, str], path: Path, known: dict[str, list[Site]] | None) -> list[Site]:
    """Return the sites that the metadata lists. `known` has what was parsed before, by its text."""
    text = metadata.get("sites", "")
    if not isinstance(text, str):
        raise RunDamaged(f"{path}: its sites are no text.")
    # Most segments of a run have the same sites: the text is parsed once.
    found = known.get(text) if known is not None else None
    if found is None:
        found = sites.parse(text.encode(), f"{path}: sites")
        if known is not None:
            known[text] = found
    return found
