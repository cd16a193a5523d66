"""`fingerprints.bin`: hashes per step of what should be the same on several ranks, cheap to compare while they train.

Each rank writes its own file from the rows that are recorded anyway. Equal hashes mean equal rows. Where they differ,
the rows themselves are compared. A record has 32 bytes: the step, then 32-bit hashes, 0 where nothing was recorded.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.core import files, schema
from sonde.core.signals import BATCH_MARK, BUFFER, part_of
from sonde.errors import RunDamaged
from sonde.records import Block, Event, Finding, Numbers, Site
from sonde.store import layout
from sonde.store.lines import Appender

NAME: Final = "fingerprints.bin"
RECORD: Final = np.dtype(
    [
        ("step", "<i8"),
        ("copies", "<u4"),  # parameters that this rank holds whole
        ("pieces", "<u4"),  # parameters that it holds a piece of
        ("which", "<u4"),  # which pieces these are
        ("buffers", "<u4"),
        ("batch", "<u4"),
        ("settings", "<u4"),
    ]
)
LAST: Final = 1024
"""How many of the last records are compared."""
SETTINGS: Final = ("lr", "momentum", "weight_decay", "scale")
"""The last parts of the names of scalars that should be the same on all ranks."""
_COLUMNS: Final = [schema.COUNT, schema.MIN, schema.MAX, schema.MEAN]
_ALL: Final = 10_000  # steps up to which each one is written; then every 10th, beyond ten times as many every 100th


def is_setting(site: Site) -> bool:
    """Return whether a scalar is a setting that ranks should share."""
    return site.quantity == "scalar" and "." in site.name and site.name.rpartition(".")[2] in SETTINGS


class FingerprintWriter:
    """A sink that writes the fingerprints of one rank, once there are `several`: a process may start the others."""

    def __init__(self, folder: Path, several: Callable[[], bool] = lambda: True) -> None:
        self._path = folder / NAME
        self._several = several
        self._file: Appender | None = None
        self._sites: dict[int, Site] = {}
        self._seen: bytes = b""
        self._order: dict[str, NDArray[np.intp]] = {}
        self._which = 0

    def take_sites(self, sites: list[Site]) -> None:
        """Take new sites."""
        self._sites.update((site.id, site) for site in sites)

    def take_block(self, block: Block) -> None:
        """Write the fingerprints of a step."""
        if block.step % _stride(block.step) or (self._file is None and not self._several()):
            return
        if block.sites.tobytes() != self._seen:
            self._arrange(block)
        if not self._order:
            return
        hashes = {name: _hash(block.rows[order]) for name, order in self._order.items()}
        if not any(hashes.values()):
            return
        record = np.zeros(1, RECORD)
        record["step"] = block.step
        record["which"] = self._which if hashes.get("pieces") else 0
        for name, value in hashes.items():
            record[name] = value
        if self._file is None:
            self._file = Appender(self._path, new=False)
        self._file.append(record.tobytes())

    def take_numbers(self, numbers: Numbers) -> None:
        """Write the fingerprints of steps with nothing but numbers, if a setting is among these."""
        sites = map(self._sites.get, numbers.sites.tolist())
        if any(site is not None and is_setting(site) for site in sites):
            for block in numbers.blocks():
                self.take_block(block)

    def _arrange(self, block: Block) -> None:
        """Find the rows that each hash is made of, in the order of their keys, which is the same on all ranks."""
        found: dict[str, list[tuple[str, int]]] = {}
        for place, number in enumerate(block.sites.tolist()):
            site = self._sites.get(number)
            name = "" if site is None else _hash_of(site)
            if site is not None and name:
                found.setdefault(name, []).append((site.key, place))
        self._seen = block.sites.tobytes()
        self._order = {name: np.array([at for _, at in sorted(rows)], np.intp) for name, rows in found.items()}
        held = (self._sites[int(block.sites[at])] for at in self._order.get("pieces", ()))
        self._which = _nonzero("\n".join(f"{site.key} {site.placement}" for site in held).encode())

    def take_event(self, event: Event) -> None:
        """Leave events to the run."""

    def take_finding(self, finding: Finding) -> None:
        """Leave findings to the run."""

    def flush(self) -> None:
        """Do nothing: nothing waits here."""

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _hash_of(site: Site) -> str:
    """Return which hash a site goes into; empty if none."""
    if site.quantity == "parameter":
        return "pieces" if site.placement else "copies"
    if site.quantity == "vital" and site.part == part_of(BUFFER):
        return "buffers"
    if site.quantity == "vital" and site.part == part_of(BATCH_MARK) and site.phase == "train":
        return "batch"
    return "settings" if is_setting(site) else ""


def _hash(rows: schema.Rows) -> int:
    return _nonzero(np.ascontiguousarray(rows[:, _COLUMNS]).tobytes()) if len(rows) else 0


def _nonzero(content: bytes) -> int:
    return zlib.crc32(content) or 1


def _stride(step: int) -> int:
    stride = 1
    while step > _ALL * stride:
        stride *= 10
    return stride


# ---------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What the fingerprints of the ranks say: what differs, what should differ and does not, and since which step."""

    kinds: frozenset[str] = frozenset()
    since: int = 0
    until: int = 0
    """The last step that was compared."""


def suspect(path: Path, *, least: int) -> Suspicion:
    """Compare the last fingerprints of all ranks; a kind counts once it shows in `least` steps.

    Before the first step ranks may differ: DistributedDataParallel copies rank 0's weights when it is created.
    """
    tails = {rank: _tail(layout.rank_folder(path, rank)) for rank in layout.ranks(path)}
    tails = {rank: tail[tail["step"] > 0] for rank, tail in tails.items() if len(tail)}
    if len(tails) < 2:
        return Suspicion()
    lowest = min(tails)
    found: dict[str, int] = {}
    same_batch = True
    until = 0
    for rank, tail in tails.items():
        if rank == lowest:
            continue
        _, ours, theirs = np.intersect1d(tails[lowest]["step"], tail["step"], return_indices=True)
        left, right = tails[lowest][ours], tail[theirs]
        until = max(until, int(left["step"][-1]) if len(left) else 0)
        for kind in ("copies", "pieces", "buffers", "settings"):
            differs = _both(left, right, kind) & (left[kind] != right[kind])
            if kind == "pieces":
                differs &= left["which"] == right["which"]
            if differs.sum() >= least:
                found[kind] = min(found.get(kind, until), int(left["step"][differs][0]))
        known = _both(left, right, "batch")
        same_batch &= bool(known.sum() >= least and (left["batch"] == right["batch"])[known].all())
    if same_batch:
        found["batch"] = 1
    return Suspicion(frozenset(found), min(found.values(), default=0), until)


def _both(left: NDArray[Any], right: NDArray[Any], kind: str) -> NDArray[np.bool_]:
    both: NDArray[np.bool_] = (left[kind] > 0) & (right[kind] > 0)
    return both


def _tail(folder: Path) -> NDArray[Any]:
    """Return the last records of a rank, of each step the newest; a record that is still being written is left out."""
    try:
        with files.open_file(folder / NAME) as file:
            size = file.seek(0, 2) // RECORD.itemsize
            file.seek(max(0, size - LAST) * RECORD.itemsize)
            records = np.frombuffer(file.read(min(size, LAST) * RECORD.itemsize), RECORD)
    except (OSError, RunDamaged):
        return np.zeros(0, RECORD)
    _, newest = np.unique(records["step"][::-1], return_index=True)
    return records[len(records) - 1 - newest]
