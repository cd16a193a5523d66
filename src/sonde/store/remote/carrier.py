"""Carry a run from its spool to an object store: sealed files whole, growing files piece by piece.

What is up is noted in the spool, in `.carried/state.json`, so a carrier that was killed goes on where it stopped. In
the store a piece or a file is always whole: objects are written in one step. Nothing is deleted from the store before
what replaces it is there.
"""

from __future__ import annotations

import os
import re
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from io import RawIOBase
from pathlib import Path
from typing import Final

from sonde.core import files
from sonde.core.files import Natural
from sonde.errors import RunDamaged, RunExists, RunNotFound
from sonde.store import layout, lease
from sonde.store.remote.address import ObjectStore, Piece, Stored, part_name, read_part

FOLDER: Final = ".carried"
STATE: Final = "state.json"

_GROWING: Final = re.compile(r".*\.(bin|jsonl|journal)")
_PIECE_BYTES: Final = 8 << 20
_MOST_PARTS: Final = 64
"""A growing file in more pieces than this is written anew as one object."""
_SETTLED_BYTES: Final = 64 << 10
"""A larger file that is not of a growing kind is carried once it has not changed between two looks."""
_TAIL_BYTES: Final = 4096
_SAVE_S: Final = 1.0
_LAST: Final = (layout.WRITER, "beat.json")


@dataclass(slots=True)
class Carried:
    """What is up of one file."""

    inode: Natural = 0
    mtime_ns: Natural = 0
    end: Natural = 0
    """How many bytes are up."""
    tail: Natural = 0
    """A checksum of the last of them: a file that was cut and written on is not taken for one that has grown."""
    whole: bool = False
    """Whether the object of the file's own name is up."""
    parts: list[str] = field(default_factory=list)


@dataclass(slots=True)
class State:
    """What a carrier knows of its work."""

    address: str
    files: dict[str, Carried] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Left:
    """What is not up yet."""

    files: int
    nbytes: int

    def __bool__(self) -> bool:
        return self.files > 0


def read_state(spool: Path) -> State | None:
    """Return what is known to be up; None where no carrier has been at work."""
    path = spool / FOLDER / STATE
    try:
        return files.convert(files.read_object(path), State, str(path), "the state of a carrier")
    except (FileNotFoundError, NotADirectoryError, RunDamaged):
        return None


def adopt(spool: Path, address: str, up: dict[str, list[Piece]]) -> None:
    """Note that files which were just copied from the store are up."""
    state = State(address)
    for name, pieces in up.items():
        with (spool / name).open("rb", buffering=0) as file:
            stat = os.fstat(file.fileno())
            known = Carried(stat.st_ino, stat.st_mtime_ns, stat.st_size, _tail(file, stat.st_size))
        known.whole = any(piece.name == name for piece in pieces)
        known.parts = [piece.name for piece in pieces if piece.name != name]
        state.files[name] = known
    (spool / FOLDER).mkdir(exist_ok=True)
    files.write(spool / FOLDER / STATE, asdict(state), sync=False)


class Pace:
    """Keeps the average of what is sent below a bound."""

    def __init__(
        self,
        bytes_per_s: float | None,
        *,
        sleep: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate, self._sleep, self._clock = bytes_per_s, sleep, clock
        self._free_at = clock()

    def sent(self, nbytes: int) -> None:
        """Wait until `nbytes` that were just sent are within the bound."""
        if self._rate is None:
            return
        self._free_at = max(self._free_at, self._clock() - 1.0) + nbytes / self._rate
        wait = self._free_at - self._clock()
        if wait > 0:
            self._sleep(wait)


class Carrier:
    """Brings the store to the state of the spool, one pass at a time.

    Args:
        spool: The folder of the run.
        store: Where it goes.
        pace: Bounds the bandwidth.
        host: Carry only what ranks of this host have written; None for all ranks.

    """

    def __init__(self, spool: Path, store: ObjectStore, *, pace: Pace | None = None, host: str | None = None) -> None:
        self.spool, self.store = spool, store
        self._pace = pace or Pace(None)
        self._host = host
        known = read_state(spool)
        self._is_known = known is not None and known.address == store.address
        self._state = known if known is not None and self._is_known else State(store.address)
        self._reconciled = False
        self._seen: dict[str, tuple[int, int, int]] = {}
        self._gone: set[str] = set()
        self._saved_at = 0.0

    def carry(self, *, settle: bool = False) -> Left:
        """Carry what is new, and return what is left.

        Args:
            settle: Whether the run has ended: every file goes up whole, under its own name.

        Raises:
            RunExists: The address holds another run.
            RunNotFound: The spool is gone.

        """
        if not self.spool.is_dir():
            raise RunNotFound(f"There is no run at {self.spool}.")
        local = self._scan()
        self._reconcile(local)
        try:
            for name in sorted(local, key=_order):
                if self._is_due(name, local[name], settle=settle):
                    self._carry_file(name, settle=settle)
            self._delete_gone(local)
        except OSError:
            self._reconciled = False  # a store that comes back may have lost what it had
            raise
        finally:
            self._save()
        self._seen = {name: _stamp(stat) for name, stat in local.items()}
        return self.left(settle=settle)

    def left(self, *, settle: bool = True) -> Left:
        """Return what is not up yet; with `settle`, also what is up in pieces only."""
        sizes = [
            stat.st_size - (known.end if known is not None and name_grows(name) else 0)
            for name, stat in self._scan().items()
            if not _is_up(known := self._state.files.get(name), stat) or (settle and not _is_settled(known))
        ]
        return Left(len(sizes) + len(self._gone), sum(max(size, 0) for size in sizes))

    def nbytes(self) -> int:
        """Return how many bytes the spool holds."""
        return sum(stat.st_size for stat in self._scan().values())

    # ------------------------------------------------------------------ what there is

    def _scan(self) -> dict[str, os.stat_result]:
        """Return the files that this carrier is to carry."""
        ranks = {rank for rank in layout.ranks(self.spool) if self._is_mine(rank)}
        found: dict[str, os.stat_result] = {}
        for folder, below, names in os.walk(self.spool):
            below[:] = [name for name in below if not name.startswith(".")]
            where = Path(folder).relative_to(self.spool)
            if not _belongs(where, ranks):
                continue
            for name in names:
                if not name.startswith("."):
                    try:
                        found[(where / name).as_posix()] = (Path(folder) / name).stat()
                    except FileNotFoundError:
                        continue  # replaced meanwhile
        return found

    def _is_mine(self, rank: int) -> bool:
        if self._host is None:
            return True
        try:
            holder = lease.read(layout.rank_folder(self.spool, rank))
        except RunDamaged:
            return False
        return holder is not None and holder.host == self._host

    def _reconcile(self, local: dict[str, os.stat_result]) -> None:
        """Compare what is noted with what is up, first and after each failure: a note may be lost, or an object."""
        if self._reconciled:
            return
        up = self.store.objects()
        writers = [name for name in local if name.endswith(f"/{layout.WRITER}")]
        if not self._is_known and any(name in up for name in writers):
            self._refuse_other_run(up)
        self._save(now=True)  # from here on, what is at the address is this run's
        parts: dict[str, list[str]] = {}
        for name in up:
            if (part := read_part(name)) is not None:
                parts.setdefault(part[0], []).append(name)
        for name, known in list(self._state.files.items()):
            if name in local and not _is_backed(known, up, name):
                del self._state.files[name]
        for name in set(parts) & set(local):
            self._state.files.setdefault(name, Carried()).parts = sorted(parts[name])
        self._reconciled = True

    def _refuse_other_run(self, up: dict[str, Stored]) -> None:
        mine = self.spool / layout.HEADER
        if layout.HEADER in up and mine.is_file() and self.store.get(layout.HEADER) == mine.read_bytes():
            return  # the same run: only the notes of what is up were lost
        raise RunExists(
            f"{self.store.address} holds another run than {self.spool}. Carry it elsewhere: "
            f"sonde push {self.spool} --to ADDRESS"
        )

    # ------------------------------------------------------------------ one file

    def _is_due(self, name: str, stat: os.stat_result, *, settle: bool) -> bool:
        known = self._state.files.get(name)
        if _is_up(known, stat):
            return settle and not _is_settled(known)
        if settle or name_grows(name) or stat.st_size <= _SETTLED_BYTES or layout.segment_range(Path(name).name):
            return True
        return self._seen.get(name) == _stamp(stat)

    def _carry_file(self, name: str, *, settle: bool) -> None:
        known = self._state.files.get(name)
        try:
            with (self.spool / name).open("rb", buffering=0) as file:
                stat = os.fstat(file.fileno())
                if known is not None and not _continues(known, file, stat):
                    self._put_whole(name, file, stat, known)  # over what is up, which goes only then
                elif settle or not name_grows(name) or (known is not None and len(known.parts) >= _MOST_PARTS):
                    self._put_whole(name, file, stat, known)
                else:
                    self._put_parts(name, file, stat, self._state.files.setdefault(name, Carried()))
        except FileNotFoundError:
            if (self.spool / name).exists():
                raise  # the store's
            return  # sealed or replaced meanwhile: the next pass finds what took its place

    def _put_whole(self, name: str, file: RawIOBase, stat: os.stat_result, known: Carried | None) -> None:
        self.store.put_file(name, self.spool / name)
        fresh = Carried(stat.st_ino, stat.st_mtime_ns, stat.st_size, whole=True)
        if name_grows(name):
            fresh.tail = _tail(file, stat.st_size)
            fresh.parts = [] if known is None else known.parts
        self._state.files[name] = fresh
        self._delete_parts(fresh)
        self._pace.sent(stat.st_size)
        self._save_sometimes()

    def _put_parts(self, name: str, file: RawIOBase, stat: os.stat_result, known: Carried) -> None:
        while known.end < stat.st_size:
            content = _read_at(file, known.end, min(_PIECE_BYTES, stat.st_size - known.end))
            if not content:
                return  # cut meanwhile
            part = part_name(name, known.end, known.end + len(content))
            self.store.put(part, content)
            known.parts.append(part)
            known.end += len(content)
            known.inode, known.tail = stat.st_ino, _tail(file, known.end)
            self._pace.sent(len(content))
            self._save_sometimes()
        known.inode, known.mtime_ns = stat.st_ino, stat.st_mtime_ns

    def _delete_parts(self, known: Carried) -> None:
        while known.parts:
            self.store.delete(known.parts[-1])
            known.parts.pop()

    def _delete_gone(self, local: dict[str, os.stat_result]) -> None:
        """Delete what was up and is no longer in the spool, if two looks in a row did not find it.

        One look may miss both a file and the one that replaces it.
        """
        gone = {name for name in self._state.files if name not in local and not (self.spool / name).exists()}
        for name in gone & self._gone:
            known = self._state.files[name]
            self.store.delete(name)
            self._delete_parts(known)
            del self._state.files[name]
        self._gone = gone - self._gone

    # ------------------------------------------------------------------ notes

    def _save_sometimes(self) -> None:
        if time.monotonic() - self._saved_at > _SAVE_S:
            self._save()

    def _save(self, *, now: bool = False) -> None:
        folder = self.spool / FOLDER
        if self.spool.is_dir() and (self._state.files or now or folder.is_dir()):
            folder.mkdir(exist_ok=True)
            files.write(folder / STATE, asdict(self._state), sync=False)
            self._saved_at = time.monotonic()


def name_grows(name: str) -> bool:
    """Return whether files of this name are appended to."""
    return _GROWING.fullmatch(name.rpartition("/")[2]) is not None


def _order(name: str) -> tuple[int, str]:
    """Order files so that a reader sees a run that is as new as its heartbeat: the description first, that last."""
    base = name.rpartition("/")[2]
    return 0 if name == layout.HEADER else 3 if base in _LAST else 2 if name_grows(name) else 1, name


def _belongs(where: Path, ranks: set[int]) -> bool:
    """Return whether a folder of a run is carried by who has these ranks; rank 0 comes with what all share."""
    parts = where.parts
    if len(parts) > 1 and parts[0] == layout.TELEMETRY:
        return layout.rank_of(parts[1]) in ranks
    return 0 in ranks


def _stamp(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _is_up(known: Carried | None, stat: os.stat_result) -> bool:
    return known is not None and (known.inode, known.end, known.mtime_ns) == _stamp(stat)


def _is_backed(known: Carried, up: dict[str, Stored], name: str) -> bool:
    """Return whether the objects that a note names are there."""
    if known.whole and (name not in up or (not known.parts and up[name].size != known.end)):
        return False
    return all(part in up for part in known.parts)


def _is_settled(known: Carried | None) -> bool:
    return known is not None and known.whole and not known.parts


def _continues(known: Carried, file: RawIOBase, stat: os.stat_result) -> bool:
    """Return whether a file begins with what is up of it."""
    if known.inode != stat.st_ino or stat.st_size < known.end:
        return False
    return _tail(file, known.end) == known.tail


def _tail(file: RawIOBase, end: int) -> int:
    start = max(0, end - _TAIL_BYTES)
    return zlib.crc32(_read_at(file, start, end - start))


def _read_at(file: RawIOBase, start: int, count: int) -> bytes:
    file.seek(start)
    return file.read(count) or b""
