"""`writer.json`: the heartbeat and status of the process that writes a rank's folder."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

from sonde.core import files
from sonde.core.files import Finite, Natural
from sonde.core.outcome import Outcome
from sonde.errors import RunDamaged, RunInUse
from sonde.store import layout

State = Literal["live"] | Outcome
Status = State | Literal["crashed"]

BEAT_S: Final = 5.0
"""Seconds between two heartbeats of a writer, at least."""
STALE_S: Final = 300.0
"""Seconds without a heartbeat after which a writer on another host counts as dead."""


OPEN: Final[set[str]] = set()
"""The tokens of the writers of this process that have not ended."""
_CLAIM_S: Final = 30.0
"""How long a process waits while another one takes the same folder."""


@contextlib.contextmanager
def claiming(folder: Path) -> Iterator[None]:
    """Let one process at a time find out whether a folder is free, and take it.

    A lock of the system on the folder itself, which ends with its process. File systems without locks (and Windows)
    leave it to the exclusive making of journals.
    """
    descriptor = _lock(folder)
    try:
        yield
    finally:
        if descriptor is not None:
            _unlock(descriptor)


def _lock(folder: Path) -> int | None:
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except (ImportError, OSError):
        return None
    deadline = time.monotonic() + _CLAIM_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.01)
                continue
            os.close(descriptor)
            raise RunInUse(f"Another process is about to write {folder}. Choose another path.") from None
        except OSError:  # no locks here
            os.close(descriptor)
            return None
        return descriptor


def _unlock(descriptor: int) -> None:
    import fcntl

    # A process forked meanwhile holds the folder open, too: closing it here would leave it locked.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The note of a writer. The numbers at the end let a list of runs be shown without reading data."""

    state: State
    pid: Natural
    host: str
    process_start: str
    attempt: Natural
    beat: Finite
    token: str = ""
    journal: Natural = 0
    """The journal that was open at the beat."""
    blocks: Natural = 0
    """Blocks written before that journal was opened."""
    last_step: int | None = None
    loss: float | str | None = None
    """The newest value of the scalar that is called a loss."""
    dropped_blocks: Natural = 0
    journal_bytes: Natural | None = None
    """Bytes of that journal at the beat; None if an older version wrote this, as for the next two."""
    events_bytes: Natural | None = None
    contents: Natural | None = None
    """The checksum of `contents.json`, once the writer has ended."""


def mine(state: State, attempt: int, beat: float) -> Lease:
    """Return the lease of this process."""
    return Lease(
        state=state,
        pid=os.getpid(),
        host=socket.gethostname(),
        process_start=process_start(os.getpid()) or "",
        attempt=attempt,
        beat=beat,
        token=os.urandom(8).hex(),
    )


def write(folder: Path, lease: Lease) -> None:
    """Write `writer.json` in one step. It is a heartbeat, not data: no need to force it to the disk."""
    files.write(folder / layout.WRITER, asdict(lease), sync=False)


def read(folder: Path) -> Lease | None:
    """Read `writer.json`, or return None where there is none.

    Raises:
        RunDamaged: It is something else.

    """
    path = folder / layout.WRITER
    try:
        plain = files.read_object(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return files.convert(plain, Lease, str(path), "the note of a writer")


def read_if_readable(folder: Path) -> Lease | None:
    """Return the lease of a folder; None if there is none, or it cannot be read."""
    try:
        return read(folder)
    except (RunDamaged, OSError):
        return None


def is_alive(lease: Lease, now: float) -> bool:
    """Return whether the writer is still there: by its process on this host, by its last heartbeat elsewhere."""
    if lease.state != "live":
        return False
    if lease.host != socket.gethostname():
        return now - lease.beat < STALE_S
    return is_running(lease.pid, lease.process_start)


def is_running(pid: int, started: str) -> bool:
    """Return whether a process of this host is still there; its start tells it from a later one of that number."""
    return _is_running(pid) and process_start(pid) in (started, None)


def status(lease: Lease | None, now: float) -> Status:
    """Return the status of a writer; one without a note has crashed."""
    if lease is None:
        return "crashed"
    if lease.state == "live":
        return "live" if is_alive(lease, now) else "crashed"
    return lease.state


def together(statuses: Iterable[Status]) -> Status:
    """Return the status of a run from those of its writers: live while one is, else the worst of them."""
    found = set(statuses)
    order: tuple[Status, ...] = ("live", "failed", "crashed", "interrupted", "finished")
    return next((status for status in order if status in found), "crashed")


def process_start(pid: int) -> str | None:
    """Return when a process started, in a form that only compares: numbers of processes are used again."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        # The second field is the name in brackets, which may hold blanks; the start time is field 22.
        return stat[stat.rindex(b")") + 2 :].split()[19].decode()
    except (OSError, ValueError, IndexError):
        return _process_start_psutil(pid)


def _process_start_psutil(pid: int) -> str | None:
    try:
        import psutil
    except ImportError:
        return None
    try:
        return f"{psutil.Process(pid).create_time():.2f}"
    except psutil.Error:
        return None


def _is_running(pid: int) -> bool:
    if pid <= 0:
        return False
    if os.name == "nt":  # there, signal 0 would end the process instead of asking for it
        return _process_start_psutil(pid) is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return not _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        return stat[stat.rindex(b")") + 2 :][:1] in (b"Z", b"X")
    except (OSError, ValueError):
        return False
