"""Find the folder of a run that several processes write, without any of them waiting for another."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import socket
import time
from pathlib import Path
from typing import Final

from sonde.core import files
from sonde.errors import RunDamaged
from sonde.store import layout, lease
from sonde.store.runs import STAR, numbered, place_of

_NOTES: Final = ".sonde"
"""The folder, beside the runs, of the notes by which ranks find the number that another has taken."""
_MAX_LAUNCHES: Final = 10_000
_FRESH_S: Final = 600.0
"""How long after a number was taken further ranks may join a run that no live process writes."""
# What the processes of one launch have in common. Numbers that a launch shares with an earlier one are distinguished by
# what the earlier one has left in its run.
_LAUNCH_VARIABLES: Final = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
)


def choose_folder(run: str | os.PathLike[str], *, rank: int, world: int, resume: bool = False) -> Path:
    """Return the folder of a run; the ranks of one launch get the same number for a star in its name.

    Raises:
        OptionError: The star stands where it cannot be replaced.

    """
    path = place_of(run, resume=resume)
    if world == 1 or resume or STAR not in Path(run).name:
        return path
    try:
        return _opened_by_parent(Path(run), rank) or _shared_number(Path(run), rank, world)
    except (OSError, RunDamaged):
        return own_folder(path)  # opening it reports what is wrong with the place


def own_folder(path: Path) -> Path:
    """Return a folder beside `path` that only this process takes."""
    return path.with_name(f"{path.name}-{socket.gethostname()}-{os.getpid()}")


def may_have_siblings() -> bool:
    """Return whether this process was started by multiprocessing, as by `torch.multiprocessing.spawn`."""
    return multiprocessing.parent_process() is not None


def _opened_by_parent(pattern: Path, rank: int) -> Path | None:
    """Return the run that the process which started this one writes, as Lightning's first process starts the others."""
    start = lease.process_start(os.getppid())
    for _, path in sorted(numbered(pattern).items(), reverse=True):
        holder = lease.read_if_readable(layout.rank_folder(path, 0))
        if holder is not None and (holder.pid, holder.process_start) == (os.getppid(), start):
            return None if _has_written(path, rank) else path
    return None


def _shared_number(pattern: Path, rank: int, world: int) -> Path:
    """Take the next number, or the one that another rank of this launch has taken."""
    launch = "\n".join(f"{name}={os.environ.get(name, '')}" for name in _LAUNCH_VARIABLES)
    token = hashlib.sha256(f"{pattern.name}\n{world}\n{launch}".encode()).hexdigest()[:24]
    folder = pattern.parent / _NOTES
    folder.mkdir(parents=True, exist_ok=True)
    for turn in range(_MAX_LAUNCHES):
        note = folder / f"{token}-{turn}.json"
        if not note.exists():
            path = place_of(pattern)
            if files.create(note, {"run": path.name, "created": time.time()}):
                path.mkdir(parents=True, exist_ok=True)  # so that no other process takes the number
                return path
        path = pattern.with_name(str(files.read_object(note)["run"]))
        if not _has_written(path, rank) and _can_be_joined(path, note):
            return path
    return own_folder(place_of(pattern))


def _has_written(path: Path, rank: int) -> bool:
    return (layout.rank_folder(path, rank) / layout.WRITER).exists()


def _can_be_joined(path: Path, note: Path) -> bool:
    """Return whether a run belongs to the launch of this process: it is being written, or was named just now."""
    now = time.time()
    # A folder without a note of its writer is just being made by another rank.
    leases = (lease.read_if_readable(layout.rank_folder(path, rank)) for rank in layout.ranks(path))
    found = {lease.status(each, now) for each in leases if each is not None}
    return "live" in found or (found <= {"finished"} and now - note.stat().st_mtime < _FRESH_S)
