"""The runs that the viewer may show: those below the folders it was given, and nothing else."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote

from sonde.errors import RunNotFound
from sonde.store import Run, RunSummary, list_runs, open_run
from sonde.store.layout import EVENTS, FINDINGS, HEADER, TELEMETRY

MOST_OPEN: Final = 16
MOST_ANSWERS: Final = 48
_FRESH_S: Final = 0.4  # how long what was read of a live run counts as new
_SCAN_S: Final = 1.0
_PARTS: Final = (HEADER, TELEMETRY, EVENTS, FINDINGS)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Listed:
    """A run as a list shows it, and the id by which the page asks for it."""

    id: str
    name: str
    summary: RunSummary


@dataclass(slots=True)
class OpenRun:
    """A run that is kept open, how often it has changed since, and what was computed from it meanwhile."""

    id: str
    name: str
    run: Run
    root: Path
    version: int = 1
    _clock: Callable[[], float] = time.monotonic
    _read_at: float = field(default=-1e9)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _kept: OrderedDict[Any, Any] = field(default_factory=OrderedDict)
    stamp: tuple[int, int] | None = None
    status: str = ""
    """What became of its writers, and `deleted` where its folder is gone; as of the last look."""

    def __post_init__(self) -> None:
        """Remember which run it is."""
        self.stamp = _stamp(self.run.path)
        self.status = self.run.status

    def refresh(self) -> int:
        """Read what was written since, unless that was done just now; return the version."""
        with self._lock:
            if self._clock() - self._read_at >= _FRESH_S:
                # A writer that is killed changes no file; what answers say of its run is out of date all the same.
                before, self.status = self.status, self._look()
                if self.run.refresh() or self.status != before:
                    self.version += 1
                    self._kept.clear()
                self._read_at = self._clock()
            return self.version

    def _look(self) -> str:
        return "deleted" if _stamp(self.run.path) is None else self.run.status

    def keep(self, key: object, make: Callable[[], T]) -> T:
        """Return what was made for a key since the run last changed, or make it."""
        version = self.refresh()
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                kept: T = self._kept[key]
                return kept
        made = make()  # outside the lock: others may ask for other things meanwhile
        with self._lock:
            if self.version == version:
                self._kept[key] = made
            while len(self._kept) > MOST_ANSWERS:
                self._kept.popitem(last=False)
        return made

    def file(self, *parts: str) -> Path:
        """Return the path of a file inside the run's folder.

        Raises:
            RunNotFound: There is none, or it leads out of the folder.

        """
        path = self.run.path.joinpath(*parts)
        if not is_inside(path, self.run.path) or not path.is_file():
            raise RunNotFound(f"The run {self.name} has no file {'/'.join(parts)}.")
        return path


class Library:
    """Finds runs below the given folders and keeps a few of them open.

    A run's id is made from its path below its folder, and looked up among the runs that were found: no id is ever
    turned into a path, so none leads outside.
    """

    def __init__(self, roots: Iterable[str | Path], *, clock: Callable[[], float] = time.monotonic) -> None:
        self.roots = tuple(Path(root).resolve() for root in roots)
        self._clock = clock
        self._lock = threading.Lock()
        self._open: OrderedDict[str, OpenRun] = OrderedDict()
        self._gates: dict[str, threading.Lock] = {}
        self._paths: dict[str, tuple[str, Path, Path]] = {}
        self._scanned_at = -1e9

    def list(self) -> list[Listed]:
        """Look for runs, and describe each in a few words; the newest come first."""
        found = []
        for number, root in enumerate(self.roots):
            base = root.parent if (root / HEADER).is_file() else root
            for summary in list_runs(root):
                name = summary.path.relative_to(base).as_posix()
                found.append(Listed(make_id(number, name), name, summary))
        with self._lock:
            self._paths = {each.id: (each.name, each.summary.path, self.roots[_number(each.id)]) for each in found}
            self._scanned_at = self._clock()
        return sorted(found, key=lambda each: each.summary.created or 0.0, reverse=True)

    def open(self, run_id: str) -> OpenRun:
        """Return a run, opened now or kept open, with what was written since.

        Raises:
            RunNotFound: No run below the folders has this id.
            RunDamaged: It cannot be read.

        """
        with self._lock:
            opened = self._open.get(run_id)
            if opened is not None:
                self._open.move_to_end(run_id)
        if opened is not None and _has_begun_anew(opened):
            opened = self._replace(opened)
        if opened is None:
            opened = self._open_new(run_id)
        opened.refresh()
        return opened

    def _open_new(self, run_id: str) -> OpenRun:
        """Open a run that is not kept open. A page asks several things at once: the first opens it for all of them."""
        name, path, root = self._find(run_id)
        with self._lock:
            gate = self._gates.setdefault(run_id, threading.Lock())
        with gate:
            with self._lock:
                opened = self._open.get(run_id)
            if opened is not None:
                return opened
            opened = OpenRun(run_id, name, open_run(path), root, _clock=self._clock)
            with self._lock:
                self._open[run_id] = opened
                evicted = [self._open.popitem(last=False)[1] for _ in range(len(self._open) - MOST_OPEN)]
                self._gates.pop(run_id, None)
        for each in evicted:
            each.run.close()
        return opened

    def _replace(self, old: OpenRun) -> OpenRun:
        """Open a run whose folder another training has taken since."""
        fresh = OpenRun(old.id, old.name, open_run(old.run.path), old.root, old.version + 1, _clock=self._clock)
        with self._lock:
            self._open[old.id] = fresh
        old.run.close()
        return fresh

    def _find(self, run_id: str) -> tuple[str, Path, Path]:
        known = self._paths.get(run_id)
        if known is None and self._clock() - self._scanned_at >= _SCAN_S:
            self.list()
            known = self._paths.get(run_id)
        if known is None:
            raise RunNotFound(f"There is no run {run_id!r:.120} here. The list of runs names those there are.")
        name, path, root = known
        leading_out = [part for part in _PARTS if not is_inside(path / part, root)]
        if leading_out:
            raise RunNotFound(f"The run {name} is not shown: its {leading_out[0]} is a link that leads out of {root}.")
        return known


def _has_begun_anew(opened: OpenRun) -> bool:
    now = _stamp(opened.run.path)
    return now is not None and now != opened.stamp


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return what changes when another run is written to the same folder; None if there is none."""
    try:
        status = (path / HEADER).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def make_id(number: int, name: str) -> str:
    """Return an id of characters without a meaning in URLs, from the number of a folder and a path below it.

    >>> make_id(0, "sweep/lr 0.1")
    '0-sweep~2Flr~200.1'
    """
    return f"{number}-{quote(name, safe='').replace('~', '%7E').replace('%', '~')}"


def _number(run_id: str) -> int:
    return int(run_id.partition("-")[0])


def is_inside(path: Path, folder: Path) -> bool:
    """Return whether a path, with all links in it followed, lies in a folder."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # a ring of links, or a name that no file can have
        return False
