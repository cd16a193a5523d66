"""The process that carries a run while it is written: started by a session, it outlives a training that is killed."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from sonde.core import files
from sonde.core.files import Finite, Natural
from sonde.errors import RunDamaged, RunExists, RunNotFound
from sonde.store import layout, lease
from sonde.store.remote.address import ObjectStore, spool_root
from sonde.store.remote.carrier import FOLDER, Carrier, Left, Pace

logger = logging.getLogger("sonde")

PROGRESS: Final = "progress.json"
_LOCK: Final = "lock"
_LONGEST_WAIT_S: Final = 60.0
LINGER_S: Final = 600.0
"""How long the process tries on after the run has ended, while the store does not answer."""
_SPOOL_LIMIT_MB: Final = 20_480


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How often and how fast is carried; from the environment, so that every process of a run has the same."""

    every_s: float = 10.0
    """SONDE_CARRY_EVERY: seconds between two passes."""
    mb_per_s: float = 32.0
    """SONDE_CARRY_MB_PER_S: the most megabytes per second, on average."""
    close_s: float = 30.0
    """SONDE_CARRY_CLOSE_S: how long the end of a session waits for the rest."""
    spool_limit_mb: float = _SPOOL_LIMIT_MB
    """SONDE_SPOOL_LIMIT_MB: beyond it, runs that ended and are up completely are deleted from the spool."""

    @classmethod
    def read(cls) -> Settings:
        """Return the settings that the environment names; what is not a number is left at its default."""
        names = {
            "every_s": "SONDE_CARRY_EVERY",
            "mb_per_s": "SONDE_CARRY_MB_PER_S",
            "close_s": "SONDE_CARRY_CLOSE_S",
            "spool_limit_mb": "SONDE_SPOOL_LIMIT_MB",
        }
        found: dict[str, float] = {}
        for field, variable in names.items():
            with contextlib.suppress(ValueError):
                value = float(os.environ.get(variable, ""))
                if 0 <= value < float("inf"):
                    found[field] = value
        return cls(**found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a carrier has done so far, for those who wait for it."""

    address: str
    passes: Natural = 0
    time: Finite = 0.0
    has_ended: bool = False
    """Whether the last pass began after the run had ended."""
    left_files: Natural = 0
    left_bytes: Natural = 0
    nbytes: Natural = 0
    """How many bytes the spool holds."""
    error: str = ""
    """Why the last pass failed, if it did."""

    @property
    def is_complete(self) -> bool:
        """Whether the run has ended and everything is up."""
        return self.has_ended and not self.left_files and not self.error


def read_progress(spool: Path) -> Progress | None:
    """Return how far a carrier has come; None where none has been at work."""
    path = spool / FOLDER / PROGRESS
    try:
        return files.convert(files.read_object(path), Progress, str(path), "the progress of a carrier")
    except (OSError, RunDamaged):
        return None


@contextlib.contextmanager
def holding(spool: Path) -> Iterator[bool]:
    """Hold the spool for one carrier; yield whether this is it."""
    folder = spool / FOLDER
    folder.mkdir(exist_ok=True)
    with (folder / _LOCK).open("ab") as file:
        yield _lock(file.fileno())


def _lock(fd: int) -> bool:
    try:
        import fcntl
    except ImportError:  # Windows
        return _lock_on_windows(fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _lock_on_windows(fd: int) -> bool:
    import msvcrt

    try:
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore] # only there
    except OSError:
        return False
    return True


class Follower:
    """Carries a run until it has ended and everything is up.

    Args:
        carrier: What carries.
        every_s: Seconds between two passes while the run is written.
        linger_s: How long to try on after its end.
        wait: Waits for so many seconds, or less if the run ends; replaced by tests.

    """

    def __init__(
        self, carrier: Carrier, *, every_s: float, linger_s: float = LINGER_S, wait: Callable[[float], object]
    ) -> None:
        self._carrier, self._every_s, self._linger_s, self._wait = carrier, every_s, linger_s, wait
        self._passes = 0
        self._failures = 0

    def run(self) -> bool:
        """Carry until the end; return whether everything is up."""
        ended_at: float | None = None
        while True:
            is_live = has_live_writer(self._carrier.spool)
            if not is_live and ended_at is None:
                ended_at = time.monotonic()
            left = self._pass(settle=not is_live)
            if left is None:
                return False  # the spool is gone, or the address is another run's
            if not is_live and self._failures == 0 and not left:
                return True
            if ended_at is not None and time.monotonic() - ended_at > self._linger_s:
                return False
            self._wait(self._pause(is_live=is_live))

    def _pause(self, *, is_live: bool) -> float:
        if self._failures:
            # Not all at once: a store that recovers gets requests from many carriers.
            return min(2.0**self._failures / 2, _LONGEST_WAIT_S) * random.uniform(0.5, 1.0)
        return self._every_s if is_live else 0.0

    def _pass(self, *, settle: bool) -> Left | None:
        error = ""
        try:
            left = self._carrier.carry(settle=settle)
            self._failures = 0
        except (RunExists, RunNotFound) as problem:
            self._note(Left(1, 0), settle, str(problem))
            return None
        except OSError as problem:
            self._failures += 1
            left, error = self._carrier.left(settle=settle), f"{type(problem).__name__}: {problem}"
        self._passes += 1
        self._note(left, settle, error)
        return left

    def _note(self, left: Left, has_ended: bool, error: str) -> None:
        carrier = self._carrier
        progress = Progress(
            address=carrier.store.address,
            passes=self._passes,
            time=time.time(),
            has_ended=has_ended,
            left_files=left.files,
            left_bytes=left.nbytes,
            nbytes=carrier.nbytes(),
            error=error[:2000],
        )
        with contextlib.suppress(OSError):
            files.write(carrier.spool / FOLDER / PROGRESS, asdict(progress), sync=False)


def has_live_writer(spool: Path) -> bool:
    """Return whether a process of this machine writes the run."""
    now = time.time()
    for rank in layout.ranks(spool):
        try:
            holder = lease.read(layout.rank_folder(spool, rank))
        except (RunDamaged, OSError):
            continue
        if holder is not None and holder.host == socket.gethostname() and lease.is_alive(holder, now):
            return True
    return False


def clear_spools(limit: int) -> list[Path]:
    """Delete the oldest runs from the spool that ended and are up completely, until `limit` bytes are left."""
    found = [
        (progress.time, path.parent.parent, progress)
        for path in spool_root().glob(f"**/{FOLDER}/{PROGRESS}")
        if (progress := read_progress(path.parent.parent)) is not None
    ]
    total = sum(progress.nbytes for _, _, progress in found)
    deleted = []
    for _, spool, progress in sorted(found, key=lambda item: item[0]):
        if total <= limit:
            break
        if progress.is_complete and not has_live_writer(spool):
            shutil.rmtree(spool, ignore_errors=True)
            deleted.append(spool)
            total -= progress.nbytes
    return deleted


class _Signal:
    """Waits for time to pass or for the session's word that the run has ended."""

    def __init__(self, stream: Any) -> None:
        self._ended = threading.Event()
        threading.Thread(target=self._listen, args=(stream,), daemon=True).start()

    def _listen(self, stream: Any) -> None:
        stream.read(1)  # a byte, or the end of the stream when the session's process dies
        self._ended.set()

    def wait(self, seconds: float) -> None:
        """Wait for some seconds; the first wait that the end falls into is cut short."""
        if self._ended.wait(seconds):
            self._ended.clear()


def main(spool: Path, address: str) -> int:
    """Carry a run; the entry point of the process."""
    if hasattr(os, "nice"):
        os.nice(10)
    settings = Settings.read()
    with holding(spool) as is_first:
        if not is_first:
            return 0  # another rank's process carries for all ranks of this machine
        clear_spools(int(settings.spool_limit_mb * (1 << 20)))
        pace = Pace(settings.mb_per_s * (1 << 20) or None)
        carrier = Carrier(spool, ObjectStore(address), pace=pace, host=socket.gethostname())
        follower = Follower(carrier, every_s=settings.every_s, wait=_Signal(sys.stdin.buffer).wait)
        return 0 if follower.run() else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
