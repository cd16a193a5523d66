"""Segments, read: sealed tables whose columns are mapped to memory and checked as they are used."""

from __future__ import annotations

import math
import mmap
import os
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, BinaryIO, Final, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from sonde.core import files, schema
from sonde.core.files import Natural
from sonde.errors import RunDamaged
from sonde.records import Site
from sonde.store.log import attempts, sites
from sonde.store.log.attempts import Attempt
from sonde.store.log.segment_format import (
    BLOCK_COLUMNS,
    DTYPES,
    FORMAT,
    GROWING,
    HIST,
    HIST_CUT,
    MERGED,
    NUM_SLICES,
    SMALL,
    SPAN,
    STEP,
    check_offsets,
    check_order,
    check_shapes,
    column_of,
    hist_crcs,
    inconsistencies,
    piece_crcs,
)
from sonde.store.log.table import Blocks, Table
from sonde.store.sealed import SealedFile, bad_checksum, raw, read_tensor

_NEAR_BYTES: Final = 16 << 10
"""Pieces of a file that lie this near are asked for in one go: a disk reads the gap sooner than it seeks over it."""


T = TypeVar("T")


class _Metadata(msgspec.Struct):
    """What a segment adds to the header, each as JSON in a text."""

    window: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,18}$")]
    attempts: str
    sites: str
    crc32: str


class Segment:
    """A segment, open for reading. The header and the short tensors are read at once, the rest is mapped when used."""

    def __init__(self, path: Path, maps: Maps, known_sites: dict[str, list[Site]] | None = None) -> None:
        self.path = path
        self._maps = maps
        with path.open("rb") as file:
            self.stamp = Stamp.of(os.fstat(file.fileno()))
            sealed = SealedFile.read(path, file, FORMAT)
            self._extents = sealed.tensors
            metadata = files.convert(sealed.metadata, _Metadata, f"{path}: its metadata", "that of a segment")
            self._crcs = _parse(metadata.crc32, dict[str, Natural], f"{path}: crc32", "a checksum for each tensor")
            small = {name: self._read_small(file, name, dtype) for name, dtype in SMALL.items()}
        self.sites = _parse_sites(metadata.sites, path, known_sites)
        self.window = int(metadata.window)
        self.site, self.offset, self.slice_crc = small["site"], small["offset"], small["slice_crc"]
        self.blocks = Blocks(*(small[f"block_{name}"] for name in BLOCK_COLUMNS))
        listed = _parse(metadata.attempts, list[Attempt], f"{path}: attempts", "a list of attempts")
        self.attempts = attempts.resolve(listed, self.first_step)
        check_shapes(path, self._extents, len(self.site), len(self.blocks))
        check_order(path, self.site, self.offset, self.blocks, self.num_rows)
        self._checked = np.zeros((NUM_SLICES, len(self.site)), dtype=bool)
        self._all_checked = False

    @property
    def first_step(self) -> int | None:
        """The first step of any row."""
        return int(self.blocks.step[0]) if len(self.blocks) else None

    @property
    def num_rows(self) -> int:
        """How many readings it holds."""
        return self._extents["step"].shape[0]

    @property
    def fixed_bytes(self) -> int:
        """How many bytes do not grow with its rows."""
        rows = (self._extents[name] for name in GROWING if name in self._extents)
        return self.stamp.size - sum(extent.end - extent.start for extent in rows)

    def table(self) -> Table:
        """Return its rows, mapped from the file.

        Raises:
            FileNotFoundError: It was compacted or thinned since it was opened; look at the folder again.

        """
        return self._maps.get(self).rows

    def prefetch(self, at: int, columns: tuple[int, ...]) -> None:
        """Ask the system to read the columns of one site that were not read yet, while other files are asked for.

        A series takes a few small pieces of every segment. Touched one after the other, each waits for a cold disk.
        """
        if not hasattr(mmap, "MADV_WILLNEED"):
            return
        wanted = [column for column in (*columns, STEP, SPAN) if not self._checked[column, at]]
        if not wanted:
            return
        first, last = int(self.offset[at]), int(self.offset[at + 1])
        whole = self._maps.get(self).whole
        for column in wanted:
            begin, width = self._place(column)
            start = (begin + first * width) // mmap.PAGESIZE * mmap.PAGESIZE
            whole.madvise(mmap.MADV_WILLNEED, start, begin + last * width - start)

    def prefetch_many(self, at: NDArray[np.intp], columns: tuple[int, ...]) -> None:
        """Ask for the columns of many sites, named in rising order, as `prefetch` does for one; near ones in one go."""
        if not hasattr(mmap, "MADV_WILLNEED"):
            return
        first, last, whole = self.offset[at].astype(np.int64), self.offset[at + 1].astype(np.int64), None
        for column in (*columns, STEP, SPAN):
            new = ~self._checked[column, at]
            if not new.any():
                continue
            begin, width = self._place(column)
            starts = (begin + first[new] * width) // mmap.PAGESIZE * mmap.PAGESIZE
            ends = begin + last[new] * width
            cuts = np.flatnonzero(starts[1:] - ends[:-1] > _NEAR_BYTES)
            whole = whole or self._maps.get(self).whole
            for start, end in zip(starts[np.append(0, cuts + 1)], ends[np.append(cuts, -1)], strict=True):
                whole.madvise(mmap.MADV_WILLNEED, int(start), max(int(end - start), 1))

    def _place(self, column: int) -> tuple[int, int]:
        """Return where a column begins in the file, and how wide its items are."""
        if column < schema.NUM_COLUMNS:
            return self._extents["stats"].start + column * self.num_rows * 8, 8
        return (self._extents["step"].start, 8) if column == STEP else (self._extents["span"].start, 4)

    def map(self) -> Mapped:
        """Map the file; `table` keeps the maps that were used last."""
        with self.path.open("rb") as file:
            if Stamp.of(os.fstat(file.fileno())) != self.stamp:
                raise FileNotFoundError(f"{self.path} was replaced")
            whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # Or else the system reads far around each piece. Measured: 2.7 GB from a cold disk for a series of 4 MB.
        _advise(whole, "MADV_RANDOM")

        def view(name: str) -> NDArray[Any]:
            extent = self._extents[name]
            count = math.prod(extent.shape)
            return np.frombuffer(whole, DTYPES[extent.dtype], count, extent.start).reshape(extent.shape)

        num_rows = self.num_rows
        has_hist = "hist" in self._extents
        rows = Table(
            site=self.site,
            offset=self.offset,
            step=view("step"),
            span=view("span"),
            merged=view("merged") if "merged" in self._extents else _constant(1, num_rows, np.uint32),
            stats=view("stats"),
            hist_lo=view("hist_lo") if has_hist else _constant(0, num_rows, np.uint8),
            hist_len=view("hist_len") if has_hist else _constant(0, num_rows, np.uint8),
            hist_offset=view("hist_offset") if has_hist else _constant(0, num_rows + 1, np.uint64),
            hist=view("hist") if has_hist else np.zeros(0, np.uint32),
            blocks=self.blocks,
        )
        return Mapped(self, rows, whole)

    def check_site(self, rows: Table, at: int, columns: tuple[int, ...], *, bins: bool) -> None:
        """Check the columns of one site that are about to be used, once.

        Raises:
            RunDamaged: They are not what was written.

        """
        first, last = int(self.offset[at]), int(self.offset[at + 1])
        for column in (*columns, STEP, SPAN, MERGED):
            if not self._checked[column, at]:
                self._compare(at, column, zlib.crc32(raw(column_of(rows, column)[first:last])))
        if bins and "hist" in self._extents and not self._checked[HIST, at]:
            check_offsets(self.path, rows, first, last)
            cut, counts = hist_crcs(rows, first, last)
            self._compare(at, HIST_CUT, cut)
            self._compare(at, HIST, counts)

    def check_sites(self, rows: Table, at: NDArray[np.intp], columns: tuple[int, ...]) -> list[str]:
        """Check the columns of many sites that are about to be used, once; return what does not match its checksum.

        `is_sound` returns afterwards which sites can be used.
        """
        for column in (*columns, STEP, SPAN, MERGED):
            new = at[~self._checked[column, at]]
            if len(new):
                crcs = piece_crcs(column_of(rows, column), self.offset[new].tolist(), self.offset[new + 1].tolist())
                self._checked[column, new] = crcs == self.slice_crc[column, new]
        bad = self.site[at[~self.is_sound(at, columns)]].tolist()
        return [f"{self.path}: the readings of site {site} do not match their checksum" for site in bad]

    def is_sound(self, at: NDArray[np.intp], columns: tuple[int, ...]) -> NDArray[np.bool_]:
        """Return for which sites all these columns match their checksums."""
        used = np.array([*columns, STEP, SPAN, MERGED])
        sound: NDArray[np.bool_] = np.all(self._checked[used][:, at], axis=0)
        return sound

    def check_all(self, rows: Table) -> None:
        """Check everything, once: what touches all sites reads the file from end to end anyway.

        Raises:
            RunDamaged: Something is not what was written.

        """
        if self._all_checked:
            return
        for problem in self.problems(rows):
            raise RunDamaged(problem)
        self._all_checked = True
        self._checked[:] = True

    def problems(self, rows: Table) -> list[str]:
        """Return which tensors do not match their checksums."""
        _advise(self._maps.get(self).whole, "MADV_SEQUENTIAL")
        mapped = {name: getattr(rows, name) for name in GROWING if name in self._extents}
        found = [
            bad_checksum(self.path, name, self._extents[name].start, self._extents[name].end)
            for name, array in mapped.items()
            if zlib.crc32(raw(array)) != self._crcs.get(name)
        ]
        _advise(self._maps.get(self).whole, "MADV_RANDOM")
        return found or inconsistencies(self.path, rows, has_hist="hist" in self._extents)

    def _compare(self, at: int, column: int, crc: int) -> None:
        if int(self.slice_crc[column, at]) != crc:
            raise RunDamaged(f"{self.path}: the readings of site {int(self.site[at])} do not match their checksum")
        self._checked[column, at] = True

    def _read_small(self, file: BinaryIO, name: str, dtype: str) -> NDArray[Any]:
        extent = self._extents.get(name)
        if extent is None:
            raise RunDamaged(f"{self.path} lacks the tensor {name!r}.")
        if extent.dtype != dtype:
            raise RunDamaged(f"{self.path}: the tensor {name!r} is {extent.dtype}, not {dtype}.")
        content = read_tensor(file, name, extent.start, extent.end, self._crcs.get(name, -1))
        return np.frombuffer(content, DTYPES[dtype]).reshape(extent.shape)


def _advise(whole: mmap.mmap, advice: str) -> None:
    """Advise the system how a map will be used, where it supports that."""
    if hasattr(mmap, advice):
        whole.madvise(getattr(mmap, advice))


def _constant(value: int, length: int, dtype: type[Any]) -> NDArray[Any]:
    return np.broadcast_to(np.array(value, dtype=dtype), (length,))


def _parse(text: str, kind: type[T], where: str, what: str) -> T:
    return files.decode(text.encode("utf-8", "surrogatepass"), kind, where, what)


def _parse_sites(text: str, path: Path, known: dict[str, list[Site]] | None) -> list[Site]:
    """Return the sites that the metadata lists. `known` has what was parsed before, by its text."""
    # Most segments of a run have the same sites: the text is parsed once.
    found = known.get(text) if known is not None else None
    if found is None:
        found = sites.parse(text.encode("utf-8", "surrogatepass"), f"{path}: sites")
        if known is not None:
            known[text] = found
    return found


@dataclass(frozen=True, slots=True)
class Stamp:
    """Identifies a file, to notice when it was replaced."""

    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, stat: os.stat_result) -> Stamp:
        """Return the stamp of a file."""
        return cls(stat.st_ino, stat.st_size, stat.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class Mapped:
    """A segment in memory. The file is read as its arrays are touched."""

    segment: Segment
    rows: Table
    whole: mmap.mmap


class Maps:
    """The mapped segments that were used last. Each holds a file open, and a process may hold only so many."""

    def __init__(self, limit: int = 192) -> None:
        self._limit = limit
        self._mapped: OrderedDict[int, Mapped] = OrderedDict()
        self._lock = Lock()

    def get(self, segment: Segment) -> Mapped:
        """Return a mapped segment, mapping it if it is not."""
        with self._lock:
            entry = self._mapped.get(id(segment))
            if entry is not None:
                self._mapped.move_to_end(id(segment))
                return entry
            entry = segment.map()
            self._mapped[id(segment)] = entry
            if len(self._mapped) > self._limit:
                self._mapped.popitem(last=False)
            return entry

    def widen(self, limit: int) -> None:
        """Allow more maps: those of a run whose segments are replaced faster than they can be mapped again."""
        self._limit = max(self._limit, limit)

    def drop(self, segment: Segment) -> None:
        """Let go of a segment that is read no more."""
        with self._lock:
            self._mapped.pop(id(segment), None)
