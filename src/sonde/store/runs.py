"""List the runs below a folder with a short summary of each, without reading what they recorded."""

from __future__ import annotations

import math
import os
import re
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sonde.core import files
from sonde.errors import OptionError, RunDamaged
from sonde.store import header, layout, lease
from sonde.store.framing import HEADER, MAGIC
from sonde.store.lease import Lease
from sonde.store.log.codec import Kind
from sonde.store.log.folder import RankFolder
from sonde.store.log.reader import open_run
from sonde.store.log.writer import is_loss
from sonde.store.remote import mirror

MAX_DEPTH: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run in a few words."""

    path: Path
    status: lease.Status
    created: float | None
    """Seconds since the epoch."""
    updated: float | None
    """When its writer last wrote a heartbeat."""
    steps: int = 0
    """How many steps were recorded."""
    last_step: int | None = None
    last_loss: float | None = None
    """The newest value of the scalar called a loss, as of `updated`, or as of its last step if the run crashed."""
    model: str = ""
    attempts: int = 1
    problem: str | None = None
    """Why the run cannot be opened, if so."""

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.path.name

    @property
    def address(self) -> str:
        """Where the run is: its folder, or its address in an object store."""
        return mirror.shown(self.path)


def list_runs(
    folder: str | Path = ".", *, max_depth: int = MAX_DEPTH, clock: Callable[[], float] = time.time
) -> list[RunSummary]:
    """Return the runs in a folder and in those below it, the newest first.

    Args:
        folder: Where to look, also in an object store; it may be a run itself.
        max_depth: How many levels below it to look.
        clock: Returns the time in seconds since the epoch.

    """
    now = clock()
    found = [summarise(path, now) for path in find_runs(folder, max_depth=max_depth)]
    return sorted(found, key=lambda run: (run.created or 0.0, str(run.path)), reverse=True)


def find_runs(folder: str | Path, *, max_depth: int = MAX_DEPTH) -> list[Path]:
    """Return the folders of the runs in a folder and in those below it, by name; nothing of a run is read."""
    place = mirror.local_path(folder)
    mirror.bring(place, brief=True)
    return list(_find(place, max_depth))


def _find(folder: Path, depth: int) -> Iterator[Path]:
    try:
        is_run = (folder / layout.HEADER).is_file()
        below = _folders_in(folder) if depth >= 0 and not is_run else []
    except OSError:
        return  # not ours to read
    if is_run:
        yield folder
    for name in below:
        yield from _find(folder / name, depth - 1)


def _folders_in(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith("."))


def summarise(path: Path, now: float) -> RunSummary:
    """Describe one run."""
    try:
        head = header.read_header(path)
    except (RunDamaged, OSError) as error:
        return RunSummary(path=path, status="crashed", created=None, updated=None, problem=str(error))
    leases = {rank: lease.read_if_readable(layout.rank_folder(path, rank)) for rank in layout.ranks(path)}
    status = lease.together(lease.status(holder, now) for holder in leases.values())
    model = head.model.get("name", "")
    base = RunSummary(
        path=path, status=status, created=float(head.created), updated=None, model=model if type(model) is str else ""
    )
    return _with_progress(base, leases) if leases else base


def _with_progress(base: RunSummary, leases: dict[int, Lease | None]) -> RunSummary:
    rank = min(leases)
    folder = layout.rank_folder(base.path, rank)
    holder = leases[rank]
    if holder is None:
        return _read_progress(base, folder)
    steps, last_step = _count(folder, holder)
    return RunSummary(
        path=base.path,
        status=base.status,
        created=base.created,
        updated=float(holder.beat),
        steps=steps,
        last_step=holder.last_step if last_step is None else last_step,
        last_loss=_loss_of_crashed(base.path) if base.status == "crashed" else _number(holder.loss),
        model=base.model,
        attempts=holder.attempt + 1,
    )


def _number(loss: float | str | None) -> float | None:
    """Return a loss as a number; a text that is not a number means that it was not finite."""
    try:
        return None if loss is None else float(loss)
    except ValueError:
        return math.nan


def _loss_of_crashed(path: Path) -> float | None:
    """Read the last loss from the run itself: its writer died before it could note it."""
    try:
        run = open_run(path)
        loss = next((site for site in run.sites if is_loss(site)), None)
        series = None if loss is None else run.series(loss, "value")
    except (RunDamaged, OSError):
        return None
    return None if series is None or not len(series) else float(series.values[-1])


def _read_progress(base: RunSummary, folder: Path) -> RunSummary:
    """Describe a run without a writer's note: all of it must be read."""
    try:
        read = RankFolder(folder)
        read.refresh()
    except (RunDamaged, OSError) as error:
        return RunSummary(path=base.path, status=base.status, created=base.created, updated=None, problem=str(error))
    return RunSummary(
        path=base.path,
        status=base.status,
        created=base.created,
        updated=None,
        steps=len(read.blocks),
        last_step=read.blocks.last_step,
        model=base.model,
        attempts=max(1, len(read.attempts)),
    )


def _count(folder: Path, holder: Lease) -> tuple[int, int | None]:
    """Count the steps: those before the journal that was open at the last beat, and those in it."""
    steps, last = holder.blocks, None
    if holder.state != "live":
        return steps, None
    number = holder.journal
    while (path := folder / layout.journal_name(number)).exists():
        more, newest = _walk(path)
        steps, last = steps + more, last if newest is None else newest
        number += 1
    return steps, last


def _walk(path: Path) -> tuple[int, int | None]:
    """Count the blocks of a journal by their headers alone."""
    count, last, at = 0, None, 0
    try:
        with files.open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            while at + HEADER.size <= size:
                magic, kind, _, step, length, *_ = HEADER.unpack(file.read(HEADER.size))
                at += HEADER.size + length
                if magic != MAGIC or at > size:
                    break
                file.seek(at)
                if kind == Kind.BLOCK:
                    count, last = count + 1, step
    except (OSError, struct.error, RunDamaged):
        pass  # sealed meanwhile
    return count, last


STAR = "*"


def place_of(run: str | os.PathLike[str], *, resume: bool = False) -> Path:
    """Return the folder of a run. A star in its last part becomes the next number; to resume, the highest there is.

    Args:
        run: The folder as the user named it.
        resume: Whether a run that exists is to be continued.

    Raises:
        OptionError: The star stands where it cannot be replaced.

    """
    given: Any = run
    if not isinstance(given, str | os.PathLike) or not str(given).strip():
        raise OptionError(f'run takes the folder to write, such as "runs/first"; got {run!r:.80}.')
    path = Path(run)
    if STAR not in str(path):
        return path
    if STAR in str(path.parent) or path.name.count(STAR) > 1:
        raise OptionError(f"run={str(path)!r}: one star can stand for a number, in the last part of the path.")
    last = max(numbered(path), default=0)
    return path.with_name(path.name.replace(STAR, str(max(1, last) if resume else last + 1)))


def numbered(path: Path) -> dict[int, Path]:
    """Return what exists with a number in place of the star of `path`, by that number."""
    names = (child.name for child in path.parent.iterdir()) if path.parent.is_dir() else ()
    return {number: path.with_name(name) for number, name in numbers_in(path, names).items()}


def numbers_in(path: Path, names: Iterable[str]) -> dict[int, str]:
    """Return the names that have a number in place of the star of `path`, by that number."""
    before, after = path.name.split(STAR)
    pattern = re.compile(f"{re.escape(before)}([0-9]+){re.escape(after)}")
    return {int(found[1]): name for name in names if (found := pattern.fullmatch(name))}
