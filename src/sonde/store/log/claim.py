"""Claim a rank's folder of a run for writing, or raise why it cannot be."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path

from sonde.errors import RunDamaged, RunError, RunExists, RunInUse, RunNotFound
from sonde.records import RunHeader, Site
from sonde.store import header, layout, lease
from sonde.store.log.folder import RankFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What earlier attempts left in a folder."""

    attempt: int = 0
    """The number of the attempt that begins now."""
    number: int = 0
    """The number of the journal that begins now."""
    journals: list[int] = field(default_factory=list)
    """Journals that were left open."""
    sites: dict[int, Site] = field(default_factory=dict)
    last_step: int | None = None
    num_blocks: int = 0
    """How many blocks still count, once those from `start_step` on are replaced."""


def claim(path: Path, rank: int, run_header: RunHeader, *, resume: bool, start_step: int | None, now: float) -> Past:
    """Make a rank's folder ready for a writer, and return what is in it.

    Raises:
        RunExists: There is a run, and it was not to be continued.
        RunInUse: Another process writes it.
        RunError: The path cannot hold a run.

    """
    folder = layout.rank_folder(path, rank)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _refuse_live_writer(path, folder, now)
        author = _author_of_header(path)
        listing = layout.list_folder(folder)
        is_used = bool(listing.segments or listing.journals) or author == rank == 0
        if is_used and not resume:
            raise RunExists(_describe(path, folder, now))
        # Any rank may come first, or be the only one that records; rank 0's description replaces that of another.
        if author is None or author > rank == 0:
            by = run_header.environment | ({"rank": rank} if rank else {})
            header.write_header(path, replace(run_header, environment=by), replace=rank == 0)
        _remove_unwritten(folder, listing)
        return _recall(folder, start_step) if listing.next_number else Past()
    except (FileExistsError, NotADirectoryError):
        raise RunError(f"{path} cannot hold a run: a file is in the way. Choose another path.") from None
    except OSError as error:
        raise RunError(
            f"A run cannot be written to {path}: {error.strerror or error}. Choose a folder that you may write."
        ) from error


def _refuse_live_writer(path: Path, folder: Path, now: float) -> None:
    try:
        holder = lease.read(folder)
    except RunDamaged:
        return  # left by a dead writer; a live one would have replaced it in one step
    if holder is not None and lease.is_alive(holder, now):
        if (holder.pid, holder.host) == (os.getpid(), socket.gethostname()):
            if holder.token not in lease.OPEN:
                return  # a writer of this process that has ended, but could not write so
            raise RunInUse(f"{path} is being written by a session of this process. Close it, or choose another path.")
        raise RunInUse(
            f"{path} is being written by process {holder.pid} on {holder.host} "
            f"(last heartbeat {max(0.0, now - holder.beat):.0f} s ago). Stop that process or choose another path."
        )


def _author_of_header(path: Path) -> int | None:
    """Return which rank wrote the run's description; None if there is none."""
    try:
        rank = header.read_header(path).environment.get("rank", 0)
    except RunNotFound:
        return None
    return rank if type(rank) is int else 0


def _describe(path: Path, folder: Path, now: float) -> str:
    read = RankFolder(folder)
    read.refresh()
    try:
        status = lease.status(lease.read(folder), now)
    except RunDamaged:
        status = "crashed"
    number = int((read.blocks.step > 0).sum())  # step 0 is the state before the first
    steps = f"{number:,} step{'' if number == 1 else 's'}" if number else "no steps yet"
    return (
        f"{path} holds a run already ({steps}, {status}). Pass resume=True to continue it, or choose another path; "
        f"run={f'{path}-*'!r} takes the next free number."
    )


def _remove_unwritten(folder: Path, listing: layout.Listing) -> None:
    """Remove a last journal that its writer was killed in beginning; the next one takes its number.

    A journal that the writer had noted held something: one that is empty now stays, and is reported as cut.
    """
    if not listing.journals:
        return
    number, name = listing.journals[-1]
    try:
        note = lease.read(folder)
    except RunDamaged:
        return
    begun = note is None or number > note.journal
    if begun and number + 1 == listing.next_number and (folder / name).stat().st_size == 0:
        (folder / name).unlink()


def _recall(folder: Path, start_step: int | None) -> Past:
    read = RankFolder(folder)
    read.refresh()
    listing = layout.list_folder(folder)
    return Past(
        attempt=max((attempt.number for attempt in read.attempts), default=-1) + 1,
        number=listing.next_number,
        journals=[number for number, _ in listing.journals],
        sites=read.sites,
        last_step=read.blocks.last_step,
        num_blocks=len(read.blocks) if start_step is None else int((read.blocks.step < start_step).sum()),
    )
