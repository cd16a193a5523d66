"""`contents.json`: what a run held when its writer ended, so that `verify` notices what was removed since.

Each rank lists the files that are there when it closes, with their sizes. Files that never change afterwards (bundles,
tapes, traces) have a checksum, files that only grow (events, findings) one of what they held. The writer's note
(`writer.json`) has the checksum of the list.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from sonde.core import files
from sonde.core.files import Natural
from sonde.errors import RunDamaged
from sonde.store import layout

NAME: Final = "contents.json"
_FIXED: Final = ("bundles/", "tapes/", "traces/")
_GROWING: Final = (layout.EVENTS, layout.FINDINGS)
# What lies beside these is the user's own: a run may be a folder that holds other things.
_AT_THE_TOP: Final = (
    layout.HEADER, layout.EVENTS, layout.FINDINGS, layout.EVALUATION_SCORES, layout.TEST_SCORES, "config.json",
)  # fmt: skip
_FOLDERS: Final = ("bundles", "tapes", "traces", "logs", layout.CAPTURES, layout.KEPT, layout.TEST)
_MAY_CHANGE: Final = ("examination.json",)
_MOST_FILES: Final = 100_000
_MOST_CHECKED: Final = 256 << 20  # bytes that are read to compute checksums; files beyond have a size only
_PIECE: Final = 1 << 20
_DEEPEST: Final = 4


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A file of a run: its size, and the CRC-32 of that many bytes, where it was computed."""

    bytes: Natural
    crc: Natural | None = None


class Contents(msgspec.Struct, frozen=True):
    """What a run held when one rank ended."""

    files: dict[str, Held]
    """By path below the run."""
    ranks: list[Natural] = []
    """The ranks that had a folder."""


_DECODER: Final = msgspec.json.Decoder(Contents)


def write(run: Path, rank: int) -> int:
    """List what a run holds, and return the checksum of the list. Rank 0 lists the run, others their own folder.

    Raises:
        OSError: It could not be written.

    """
    left = _MOST_CHECKED
    found: dict[str, Held] = {}
    for name in sorted(_names(run, rank)):
        try:
            size = (run / name).stat().st_size
            is_checked = size <= left and (name.startswith(_FIXED) or name.endswith(_GROWING))
            is_checked = is_checked and not name.endswith(_MAY_CHANGE)
            found[name] = Held(size, crc_of(run / name, size) if is_checked else None)
        except (OSError, RunDamaged):
            continue  # replaced meanwhile
        left -= size if is_checked else 0
        if len(found) >= _MOST_FILES:
            break
    content = msgspec.json.encode(Contents(found, layout.ranks(run) if rank == 0 else []))
    with files.replacing(layout.rank_folder(run, rank) / NAME, sync=False) as file:
        file.write(content)
    return zlib.crc32(content)


def read(run: Path, rank: int, crc: int) -> Contents:
    """Read the list that a rank left.

    Raises:
        RunDamaged: It is not there, or not the one that was written.

    """
    path = layout.rank_folder(run, rank) / NAME
    try:
        content = files.read_file(path)
    except FileNotFoundError:
        raise RunDamaged(f"{path} is missing") from None
    if zlib.crc32(content) != crc:
        raise RunDamaged(f"{path} does not match its checksum")
    return files.read_as(path, _DECODER, "a list of the files of a run")


def problems(run: Path, listed: Contents) -> Iterator[tuple[Path, str]]:
    """Yield what is missing or cut of what was listed."""
    for rank in listed.ranks:
        if not layout.rank_folder(run, rank).is_dir():
            yield layout.rank_folder(run, rank), "is missing"
    for name, held in listed.files.items():
        if name.startswith("/") or ".." in name.split("/"):
            yield run / NAME, f"lists {name!r:.200}, which lies outside of the run"
        elif what := _problem(run / name, held, name):
            yield run / name, what


def _problem(path: Path, held: Held, name: str) -> str:
    is_fixed = name.startswith(_FIXED) and not name.endswith(_MAY_CHANGE)
    try:
        size = path.stat().st_size
        is_cut = size < held.bytes and (is_fixed or name.endswith(_GROWING) or not size)
        if is_cut or (size > held.bytes and is_fixed):
            return f"has {size:,} bytes; it had {held.bytes:,} when the run ended"
        if held.crc is not None and crc_of(path, held.bytes) != held.crc:
            return "is not what it was when the run ended: its checksum differs"
    except FileNotFoundError:
        return "is missing"
    except (OSError, RunDamaged) as error:
        return str(error)
    return ""


def crc_of(path: Path, size: int) -> int:
    """Return the CRC-32 of the first `size` bytes of a file."""
    crc = 0
    with files.open_file(path, buffering=0) as file:
        while size > 0 and (piece := file.read(min(_PIECE, size))):
            crc, size = zlib.crc32(piece, crc), size - len(piece)
    return crc


def _names(run: Path, rank: int) -> Iterator[str]:
    """Yield the files of a run, by path below it: no links, and none of telemetry that have a number of their own."""
    own = layout.rank_folder(run, rank)
    yield from (name for name in _below(run, own, 1) if not name.endswith((NAME, layout.WRITER)))
    if not rank:
        yield from beside_telemetry(run)


def beside_telemetry(run: Path) -> Iterator[str]:
    """Yield what Sonde wrote into the folder of a run beside telemetry: events, tapes, captures, logs, ..."""
    for entry in sorted(run.iterdir()):
        if entry.name in _AT_THE_TOP and entry.is_file() and not entry.is_symlink():
            yield entry.name
        elif (entry.name in _FOLDERS or layout.epoch_of(entry.name) is not None) and not entry.is_symlink():
            yield from _below(run, entry, _DEEPEST)


def _below(run: Path, top: Path, depth: int) -> Iterator[str]:
    for folder, inside, names in os.walk(top):
        level = len(Path(folder).relative_to(top).parts)
        inside[:] = [each for each in inside if not each.startswith(".") and level + 1 < depth]
        for name in sorted(names):
            path = Path(folder) / name
            if not name.startswith(".") and not _counts_itself(name) and not path.is_symlink():
                yield path.relative_to(run).as_posix()


def _counts_itself(name: str) -> bool:
    """Return whether a file has a number of its own, or is replaced all the time."""
    return (
        name.endswith((layout.DAMAGED, ".journal", ".open"))
        or layout.journal_number(name) is not None
        or layout.segment_range(name) is not None
    )
