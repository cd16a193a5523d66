"""Read segments: sealed tables whose columns are read in parts and checked when they are used."""

from __future__ import annotations

import functools
import math
import os
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
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
from sonde.store.remote import mirror
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
    """A segment, open for reading. The header and the short tensors are read at once, the rest when it is used."""

    def __init__(
        self, path: Path, handles: Handles | None = None, known_sites: dict[str, list[Site]] | None = None
    ) -> None:
        self.path = path
        self._handles = handles
        with files.open_file(path) as file:
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
        """Return all its rows; those of the segments that were used last are kept in memory.

        Raises:
            FileNotFoundError: It was compacted or thinned since it was opened; look at the folder again.
            RunDamaged: It was cut since.

        """
        return self.read() if self._handles is None else self._handles.table(self)

    def hold(self) -> None:
        """Open the file now: what a busy writer replaces meanwhile can still be read."""
        self._handle()

    def _handle(self) -> Handle:
        return self.open() if self._handles is None else self._handles.get(self)

    def open(self) -> Handle:
        """Open the file, if it is still the one whose header was read."""
        with files.open_file(self.path, buffering=0) as file:
            if Stamp.of(os.fstat(file.fileno())) != self.stamp:
                raise FileNotFoundError(f"{self.path} was replaced")
            handle = Handle(os.dup(file.fileno()))
        # Or else the system reads far around each piece. Measured: 2.7 GB from a cold disk for a series of 4 MB.
        handle.advise("POSIX_FADV_RANDOM", 0, 0)
        return handle

    def read(self) -> Table:
        """Read all its rows into memory."""
        whole = np.empty(self.stamp.size, np.uint8)
        self._handle().read(whole, 0, self.path)

        def view(name: str) -> NDArray[Any]:
            extent = self._extents[name]
            return np.frombuffer(whole, DTYPES[extent.dtype], math.prod(extent.shape), extent.start).reshape(
                extent.shape
            )

        num_rows = self.num_rows
        has_hist = "hist" in self._extents
        return Table(
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

    def prefetch(self, at: NDArray[np.intp], columns: tuple[int, ...]) -> None:
        """Ask the system to read the columns of some sites, named in rising order, while other files are asked for.

        A series takes a few small pieces of every segment. Read one after the other, each waits for a cold disk.
        """
        if self.is_sound(at, columns).all():
            return
        new = [column for column in (*columns, STEP, SPAN) if not self._checked[column, at].all()]
        handle = self._handle()
        first, last = self._rows_of(at)
        for column in new:
            begin, width = self._place(column)
            for start, end in _near(first * width, last * width):
                low, high = int(first[start]) * width, int(last[end - 1]) * width
                handle.advise("POSIX_FADV_WILLNEED", begin + low, high - low)
                mirror.need(self.path, begin + low, begin + high, wait=False)

    def load(self, at: NDArray[np.intp], columns: tuple[int, ...], *, bins: bool = False) -> Loaded:
        """Read some columns of some sites, named in rising order, and check what was not checked before.

        Raises:
            FileNotFoundError: It was compacted or thinned since it was opened; look at the folder again.
            RunDamaged: It was cut since.

        """
        handle = self._handle()
        first, last = self._rows_of(at)
        offset = np.append(0, np.cumsum(last - first)).astype(np.uint64)
        num_rows = int(offset[-1])
        stats = {column: np.empty(num_rows, "<f8") for column in columns}
        for column in columns:
            self._column(handle, column, first, last, stats[column])
        step, span = np.empty(num_rows, "<i8"), np.empty(num_rows, "<u4")
        self._column(handle, STEP, first, last, step)
        self._column(handle, SPAN, first, last, span)
        is_merged = "merged" in self._extents
        has_hist = "hist" in self._extents
        rows = Table(
            site=self.site[at],
            offset=offset,
            step=step,
            span=span,
            merged=self._tensor(handle, "merged", first, last) if is_merged else _constant(1, num_rows, np.uint32),
            stats=stats,  # type: ignore[arg-type] # by column, like the whole
            hist_lo=_constant(0, num_rows, np.uint8),
            hist_len=self._tensor(handle, "hist_len", first, last) if has_hist else _constant(0, num_rows, np.uint8),
            hist_offset=_constant(0, num_rows + 1, np.uint64),
            hist=np.zeros(0, np.uint32),
            blocks=self.blocks,
        )
        sound = self.is_sound(at, columns)
        if not sound.all():
            self._check(rows, at, columns)
            sound = self.is_sound(at, columns)
        problems = [_mismatch(self.path, number) for number in self.site[at[~sound]].tolist()]
        if bins and has_hist and sound.all():
            rows = self._with_bins(handle, rows, at)
        return Loaded(rows, sound, problems)

    def _rows_of(self, at: NDArray[np.intp]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return self.offset[at].astype(np.int64), self.offset[at + 1].astype(np.int64)

    def _place(self, column: int) -> tuple[int, int]:
        """Return where a column begins in the file, and how wide its items are."""
        if column < schema.NUM_COLUMNS:
            return self._extents["stats"].start + column * self.num_rows * 8, 8
        return (self._extents["step"].start, 8) if column == STEP else (self._extents["span"].start, 4)

    def _column(
        self, handle: Handle, column: int, first: NDArray[np.int64], last: NDArray[np.int64], out: NDArray[Any]
    ) -> None:
        _gather(handle, self._place(column)[0], first, last, out, self.path)

    def _tensor(self, handle: Handle, name: str, first: NDArray[np.int64], last: NDArray[np.int64]) -> NDArray[Any]:
        extent = self._extents[name]
        out = np.empty(int((last - first).sum()), DTYPES[extent.dtype])
        _gather(handle, extent.start, first, last, out, self.path)
        return out

    def _check(self, rows: Table, at: NDArray[np.intp], columns: tuple[int, ...]) -> None:
        """Compare what was read with its checksums, unless that was done before."""
        for column in (*columns, STEP, SPAN, MERGED):
            new = ~self._checked[column, at]
            if new.any():
                first, last = rows.offset[:-1][new].tolist(), rows.offset[1:][new].tolist()
                crcs = piece_crcs(column_of(rows, column), first, last)
                self._checked[column, at[new]] = crcs == self.slice_crc[column, at[new]]

    def _with_bins(self, handle: Handle, rows: Table, at: NDArray[np.intp]) -> Table:
        """Add the histograms, and check them.

        Raises:
            RunDamaged: They are not what was written.

        """
        found: list[Table] = []
        for place, site in enumerate(at.tolist()):
            first, last = self._rows_of(at[place : place + 1])
            lo, lengths = self._tensor(handle, "hist_lo", first, last), self._tensor(handle, "hist_len", first, last)
            offsets = self._tensor(handle, "hist_offset", first, last + 1)
            low, high = int(offsets[0]), int(offsets[-1])
            if not 0 <= low <= high <= self._extents["hist"].shape[0]:
                raise RunDamaged(f"{self.path}: the histograms of site {int(self.site[site])} make no sense.")
            counts = self._tensor(handle, "hist", np.array([low]), np.array([high]))
            part = replace(rows, hist_lo=lo, hist_len=lengths, hist_offset=offsets - offsets[0], hist=counts)
            check_offsets(self.path, part, 0, len(lo))
            if not self._checked[HIST, site]:
                cut, crc = hist_crcs(part, 0, len(lo))
                self._compare(site, HIST_CUT, cut)
                self._compare(site, HIST, crc)
            found.append(part)
        sizes = np.append(0, np.cumsum([len(each.hist) for each in found])).astype(np.uint64)
        starts = [each.hist_offset[:-1] + base for each, base in zip(found, sizes[:-1], strict=True)]
        return replace(
            rows,
            hist_lo=np.concatenate([each.hist_lo for each in found]),
            hist_len=np.concatenate([each.hist_len for each in found]),
            hist_offset=np.concatenate([*starts, sizes[-1:]]),
            hist=np.concatenate([each.hist for each in found]),
        )

    def is_sound(self, at: NDArray[np.intp], columns: tuple[int, ...]) -> NDArray[np.bool_]:
        """Return for which sites all these columns match their checksums."""
        used = [*columns, STEP, SPAN, MERGED]
        if len(at) == 1:
            sound = np.asarray(self._checked[used, at[0]].all(keepdims=True))
        else:
            sound = np.all(self._checked[used][:, at], axis=0)
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
        read = {name: getattr(rows, name) for name in GROWING if name in self._extents}
        found = [
            bad_checksum(self.path, name, self._extents[name].start, self._extents[name].end)
            for name, array in read.items()
            if zlib.crc32(raw(array)) != self._crcs.get(name)
        ]
        return found or inconsistencies(self.path, rows, has_hist="hist" in self._extents)

    def _compare(self, at: int, column: int, crc: int) -> None:
        if int(self.slice_crc[column, at]) != crc:
            raise RunDamaged(_mismatch(self.path, int(self.site[at])))
        self._checked[column, at] = True

    def _read_small(self, file: BinaryIO, name: str, dtype: str) -> NDArray[Any]:
        extent = self._extents.get(name)
        if extent is None:
            raise RunDamaged(f"{self.path} lacks the tensor {name!r}.")
        if extent.dtype != dtype:
            raise RunDamaged(f"{self.path}: the tensor {name!r} is {extent.dtype}, not {dtype}.")
        content = read_tensor(file, name, extent.start, extent.end, self._crcs.get(name, -1))
        return np.frombuffer(content, DTYPES[dtype]).reshape(extent.shape)


def _mismatch(path: Path, site: int) -> str:
    return f"{path}: the readings of site {site} do not match their checksum"


def _near(first: NDArray[np.int64], last: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield groups of pieces that lie near each other, each as its first and the one after its last."""
    cuts = np.flatnonzero(first[1:] - last[:-1] > _NEAR_BYTES) + 1
    bounds = [0, *cuts.tolist(), len(first)]
    return pairwise(bounds) if len(first) else iter(())


def _gather(
    handle: Handle, begin: int, first: NDArray[np.int64], last: NDArray[np.int64], out: NDArray[Any], path: Path
) -> None:
    """Read pieces of a column into an array, one after the other; those that lie near each other in one go."""
    width, done = out.itemsize, 0
    if len(first) == 1:
        handle.read(out.view(np.uint8), begin + int(first[0]) * width, path)
        return
    lengths = last - first
    for low, high in _near(first * width, last * width):
        count, size = int(last[high - 1] - first[low]), int(lengths[low:high].sum())
        start = begin + int(first[low]) * width
        if count == size:  # without gaps
            handle.read(out[done : done + size].view(np.uint8), start, path)
        else:
            around = np.empty(count, out.dtype)
            handle.read(around.view(np.uint8), start, path)
            inside = np.repeat(first[low:high] - first[low], lengths[low:high])
            within = np.arange(size) - np.repeat(np.cumsum(lengths[low:high]) - lengths[low:high], lengths[low:high])
            out[done : done + size] = around[inside + within]
        done += size


@functools.lru_cache(maxsize=256)
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
class Loaded:
    """What was read of some sites: their rows, which of them match their checksums, and what is wrong."""

    rows: Table
    sound: NDArray[np.bool_]
    problems: list[str]


class Handle:
    """A file that is read piece by piece. It is closed with its last user.

    It is not mapped: cutting a mapped file ends every process that touches what is gone.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, into: NDArray[np.uint8], start: int, path: Path) -> None:
        """Fill an array from a place in the file.

        Raises:
            RunDamaged: The file ends before.

        """
        view = into.data
        mirror.need(path, start, start + len(view))
        while len(view):
            count = _read_at(self._fd, view, start)
            if not count:
                raise RunDamaged(f"{path} was cut while it was read: it ends before byte {start + len(view):,}.")
            view, start = view[count:], start + count

    def advise(self, advice: str, start: int, length: int) -> None:
        """Advise the system how the file will be used, where it supports that."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, start, length, getattr(os, advice))

    def __del__(self) -> None:
        os.close(self._fd)


_AT_ONCE: Final = 1 << 30  # the most that one call of the system takes
_seeking: Final = Lock()


def _read_at(fd: int, view: memoryview, start: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, [view[:_AT_ONCE]], start)
    with _seeking:
        os.lseek(fd, start, os.SEEK_SET)
        content = os.read(fd, min(len(view), _AT_ONCE))
    view[: len(content)] = content
    return len(content)


class Handles:
    """The segments that were used last: their open files, and all rows of a few.

    A process may open a limited number of files.
    """

    def __init__(self, limit: int | None = None, max_bytes: int = 192 << 20) -> None:
        self._limit = usual_limit() if limit is None else limit
        self._max_bytes = max_bytes
        self._open: OrderedDict[int, tuple[Segment, Handle]] = OrderedDict()
        self._tables: OrderedDict[int, tuple[Segment, Table]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._open)

    def get(self, segment: Segment) -> Handle:
        """Return the open file of a segment."""
        with self._lock:
            found = self._open.get(id(segment))
            if found is None:
                found = self._open[id(segment)] = (segment, segment.open())
            self._open.move_to_end(id(segment))
            while len(self._open) > self._limit:
                self._open.popitem(last=False)
            return found[1]

    def table(self, segment: Segment) -> Table:
        """Return all rows of a segment."""
        with self._lock:
            found = self._tables.get(id(segment))
            if found is not None:
                self._tables.move_to_end(id(segment))
                return found[1]
        rows = segment.read()
        with self._lock:
            self._tables[id(segment)] = (segment, rows)
            while len(self._tables) > 1 and self._size() > self._max_bytes:
                self._tables.popitem(last=False)
        return rows

    def _size(self) -> int:
        return sum(segment.stamp.size for segment, _ in self._tables.values())

    def widen(self, limit: int) -> None:
        """Allow more open files: those of a run whose segments are replaced faster than they can be opened again."""
        self._limit = max(self._limit, min(limit, 4 * usual_limit()))

    def drop(self, segment: Segment) -> None:
        """Close the file of a segment that is read no more."""
        with self._lock:
            self._open.pop(id(segment), None)
            self._tables.pop(id(segment), None)


def usual_limit() -> int:
    """Return how many files of segments may be open at once: an eighth of what the process may open."""
    try:
        import resource

        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except (ImportError, OSError, ValueError):  # such as on Windows
        soft = 512
    return max(8, min(192, (soft if soft > 0 else 1 << 16) // 8))


SHARED: Final = Handles()
"""Shared by all runs that this process reads."""
