"""Read runs in an object store through a folder of this process: small files are copied, sealed ones fetched by ranges.

The folder looks like the run, so everything that reads runs reads it. A sealed file in it has the right size from the
start and no content; `need` fetches the ranges that are about to be read. Every range of a sealed file is checked
against its checksum when it is used, so a range that was not fetched is never taken for data. The folder is deleted
when the process ends.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from io import DEFAULT_BUFFER_SIZE
from pathlib import Path
from typing import Final

from sonde.errors import RunError
from sonde.store import layout
from sonde.store.remote import address as addresses
from sonde.store.remote.address import ObjectStore, Piece, Stored, assemble
from sonde.store.remote.carrier import name_grows

logger = logging.getLogger("sonde")

_FRESH_S: Final = 2.0
"""How long a listing counts as new: a page of the viewer asks many things at once."""
_BLOCK: Final = 128 << 10
_WHOLE_BYTES: Final = 512 << 10
"""A sealed file up to this size is fetched whole when it is first used."""
_MOST_BYTES: Final = 64 << 20
"""Larger files of other kinds (checkpoints, bundles) are left in the store."""
_TAIL_BYTES: Final = 4096
_BRIEF: Final = re.compile(rf"{layout.HEADER}|.*/{layout.WRITER}|.*/journal-\d+\.bin")
_PAGE: Final = re.compile(r"page_\d+\.safetensors")

_root: Path | None = None
_runs: dict[Path, RunMirror] = {}
_folders: dict[Path, float] = {}
"""Folders of runs that were listed, and when."""
_sparse: dict[str, Sparse] = {}
_lock = threading.RLock()


def local_path(place: str | os.PathLike[str]) -> Path:
    """Return the folder in which to read a place: that itself, or its mirror where it is an address in a store.

    Raises:
        MissingExtra: The package that reaches the store is not installed.
        OptionError: The address cannot be read.

    """
    address = None if Path(place).exists() else addresses.as_address(place)
    if address is None:
        return Path(place)
    path = addresses.below(_mirror_root(), address)
    with _lock:
        if path not in _runs and path not in _folders:
            if layout.HEADER in ObjectStore(address).list_level()[1]:
                _runs[path] = RunMirror(ObjectStore(address), path)
            else:
                _folders[path] = -1e9
    bring(path)
    return path


def is_mirrored(path: Path) -> bool:
    """Return whether a folder is the copy of an address in an object store."""
    return _root is not None and path.is_relative_to(_root)


def shown(path: Path) -> str:
    """Return how a folder is named to people: by its address if it is a mirror."""
    address = None if _root is None else addresses.address_below(_root, path)
    return str(path) if address is None else address


def bring(path: Path, *, brief: bool = False) -> None:
    """Copy what is new of a mirrored run, or find the runs of a mirrored folder; nothing for any other folder.

    Args:
        path: A folder of this machine.
        brief: Whether only what a list of runs shows is needed.

    Raises:
        RunError: The store does not answer.

    """
    if not is_mirrored(path):
        return
    try:
        with _lock:
            if path in _runs:
                _runs[path].sync(brief=brief)
            elif path in _folders and time.monotonic() - _folders[path] > _FRESH_S:
                _find_runs(path)
                _folders[path] = time.monotonic()
    except OSError as error:
        raise RunError(f"{shown(path)} cannot be read: {error}") from error


def need(path: Path | str, start: int, end: int, *, wait: bool = True) -> None:
    """Fetch the bytes of a file from `start` to `end` before they are read, unless the file is complete.

    Raises:
        FileNotFoundError: The file was replaced in the store.

    """
    if _sparse and (found := _sparse.get(str(path))) is not None:
        found.need(start, end + DEFAULT_BUFFER_SIZE, wait=wait)  # a buffered reader reads ahead


def need_all(folder: Path) -> None:
    """Fetch everything of a mirrored run."""
    for name, found in list(_sparse.items()):
        if Path(name).is_relative_to(folder):
            found.need(0, 1 << 62, wait=True)


def is_sparse(path: Path) -> bool:
    """Return whether parts of a file may have to be fetched."""
    return str(path) in _sparse


def forget(path: Path) -> None:
    """Delete the mirror of one run, so that work on thousands takes the room of one; nothing for other folders."""
    with _lock:
        if _runs.pop(path, None) is not None:
            for name in [each for each in _sparse if Path(each).is_relative_to(path)]:
                del _sparse[name]
            shutil.rmtree(path, ignore_errors=True)


def close() -> None:
    """Delete all mirrors, and end the threads that fetch."""
    global _root  # noqa: PLW0603 - one folder per process
    with _lock:
        if _workers.cache_info().currsize:
            _workers().shutdown()
            _workers.cache_clear()
        if _root is not None:
            shutil.rmtree(_root, ignore_errors=True)
        _root = None
        _runs.clear()
        _folders.clear()
        _sparse.clear()


# --------------------------------------------------------------------------------
# Folders of runs.


def _mirror_root() -> Path:
    global _root  # noqa: PLW0603 - one folder per process
    with _lock:
        if _root is None:
            _root = Path(tempfile.mkdtemp(prefix="sonde-mirror-")).resolve()
            atexit.register(_delete_own, _root, os.getpid())
        return _root


def _delete_own(root: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child
        shutil.rmtree(root, ignore_errors=True)


@cache
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(16, thread_name_prefix="sonde-fetch")


def _find_runs(path: Path) -> None:
    """Find the runs below a mirrored folder, level by level, and copy what a list of them shows."""
    from sonde.store.runs import MAX_DEPTH

    level = [path]
    found: list[Path] = []
    for _ in range(MAX_DEPTH + 1):
        stores = [ObjectStore(shown(folder)) for folder in level]
        listed = list(_workers().map(lambda store: store.list_level(), stores))
        found += [folder for folder, (_, names) in zip(level, listed, strict=True) if layout.HEADER in names]
        level = [
            folder / name
            for folder, (below, names) in zip(level, listed, strict=True)
            if layout.HEADER not in names
            for name in below
            if not name.startswith(".")
        ]
    for folder in found:
        _runs.setdefault(folder, RunMirror(ObjectStore(shown(folder)), folder))
    for folder in [each for each in _runs if each.is_relative_to(path) and each not in found]:
        shutil.rmtree(folder, ignore_errors=True)
        del _runs[folder]
    list(_workers().map(lambda folder: _runs[folder].sync(brief=True, parallel=False), found))


# --------------------------------------------------------------------------------
# One run.


@dataclass(slots=True)
class RunMirror:
    """The copy of one run."""

    store: ObjectStore
    path: Path
    fetched: int = 0
    """Bytes that were fetched so far."""
    left_out: list[str] = field(default_factory=list)
    """Files that are too large to copy."""
    _versions: dict[str, tuple[object, ...]] = field(default_factory=dict)
    _synced: dict[bool, float] = field(default_factory=dict)

    def sync(self, *, brief: bool = False, parallel: bool = True) -> None:
        """Copy what is new, unless that was done just now."""
        last = max(self._synced.get(False, -1e9), self._synced.get(brief, -1e9))
        if time.monotonic() - last < _FRESH_S:
            return
        objects = self.store.objects()
        wanted = {name: pieces for name, pieces in assemble(objects).items() if not brief or _BRIEF.fullmatch(name)}
        new = [name for name in wanted if self._versions.get(name) != _version(wanted[name], objects)]
        self.path.mkdir(parents=True, exist_ok=True)
        # What replaces files comes before they go, as in the run itself.
        jobs = [(name, wanted[name], _version(wanted[name], objects)) for name in new]
        for _ in _workers().map(self._update, jobs) if parallel else map(self._update, jobs):
            pass
        for name in [each for each in self._versions if each not in wanted and not brief]:
            self._forget(name)
        self._synced[brief] = time.monotonic()

    def _update(self, job: tuple[str, list[Piece], tuple[object, ...]]) -> None:
        name, pieces, version = job
        target = self.path / name
        size = pieces[-1].end if pieces else 0
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            if _is_sealed(target.name):
                self._make_sparse(target, name, size)
            elif size > _MOST_BYTES:
                self._leave_out(name, size)
            elif not (name_grows(name) and target.exists() and self._extend(target, pieces)):
                self._replace(target, self._read(pieces, 0))
        except FileNotFoundError:
            return  # replaced since it was listed: the next look finds what took its place
        self._versions[name] = version

    def _read(self, pieces: Iterable[Piece], start: int) -> bytes:
        """Return the bytes of a file from `start` on."""
        found = []
        for piece in pieces:
            if piece.end > start:
                content = self.store.get(piece.name, max(0, start - piece.start), piece.end - piece.start)
                found.append(content)
                self.fetched += len(content)
                start = piece.end
        return b"".join(found)

    def _extend(self, target: Path, pieces: list[Piece]) -> bool:
        """Append what is new to a file that grows; return whether it goes on where its copy ends."""
        size = target.stat().st_size
        if not pieces or pieces[-1].end < size:
            return False
        start = max(0, size - _TAIL_BYTES)
        with target.open("r+b") as file:
            file.seek(start)
            before = file.read()
            after = self._read(pieces, start)
            if not after.startswith(before):
                return False
            file.seek(size)
            file.write(after[len(before) :])
        return True

    def _replace(self, target: Path, content: bytes) -> None:
        draft = target.with_name(f".{target.name}.fetched")
        draft.write_bytes(content)
        draft.replace(target)

    def _make_sparse(self, target: Path, name: str, size: int) -> None:
        draft = target.with_name(f".{target.name}.fetched")
        with draft.open("wb") as file:
            file.truncate(size)
        draft.replace(target)
        _sparse[str(target)] = Sparse(self, target, name, size)

    def _leave_out(self, name: str, size: int) -> None:
        if name not in self.left_out:
            self.left_out.append(name)
            logger.info("%s/%s (%.0f MB) is not copied", self.store.address, name, size / 1e6)

    def _forget(self, name: str) -> None:
        _sparse.pop(str(self.path / name), None)
        (self.path / name).unlink(missing_ok=True)
        self._versions.pop(name, None)


def _is_sealed(name: str) -> bool:
    return layout.segment_range(name) is not None or _PAGE.fullmatch(name) is not None


def _version(pieces: list[Piece], objects: dict[str, Stored]) -> tuple[object, ...]:
    return tuple((piece.name, objects[piece.name].size, objects[piece.name].version) for piece in pieces)


class Sparse:
    """A file whose ranges are fetched when they are needed."""

    def __init__(self, run: RunMirror, path: Path, name: str, size: int) -> None:
        self._run, self._path, self._name, self._size = run, path, name, size
        stat = path.stat()
        self._inode, self._mtime_ns = stat.st_ino, stat.st_mtime_ns
        self._have = bytearray(-(-size // _BLOCK))
        self._coming: list[Future[None]] = []
        self._lock = threading.Lock()

    def need(self, start: int, end: int, *, wait: bool) -> None:
        """Fetch the blocks that hold some bytes, those that are missing; in the background unless `wait`."""
        if self._size <= _WHOLE_BYTES:
            start, end = 0, self._size
        first, last = start // _BLOCK, -(-min(end, self._size) // _BLOCK)
        with self._lock:
            for begin, stop in _missing(self._have, first, last):
                self._have[begin:stop] = b"\1" * (stop - begin)
                self._coming.append(_workers().submit(self._fetch, begin, stop))
            coming = list(self._coming)
        if not wait:
            return
        for future in coming:
            future.result()
        with self._lock:
            self._coming = [future for future in self._coming if not future.done()]

    def _fetch(self, first: int, last: int) -> None:
        start, end = first * _BLOCK, min(last * _BLOCK, self._size)
        try:
            content = self._run.store.get(self._name, start, end)
            if len(content) != end - start:
                raise FileNotFoundError(f"{self._name} was replaced by a shorter one")
            with self._path.open("r+b") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode:
                    raise FileNotFoundError(f"{self._name} was replaced")
                file.seek(start)
                file.write(content)
            # By its time a reader knows that the file is the one it has opened.
            os.utime(self._path, ns=(stat.st_atime_ns, self._mtime_ns))
        except BaseException:
            with self._lock:
                self._have[first:last] = bytes(last - first)
            raise
        self._run.fetched += len(content)


def _missing(have: bytearray, first: int, last: int) -> list[tuple[int, int]]:
    """Return the ranges of blocks that are not there."""
    found: list[tuple[int, int]] = []
    for number in range(first, last):
        if have[number]:
            continue
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found
