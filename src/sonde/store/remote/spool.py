"""The local folder of a run that goes to an object store: found when a session opens, and carried up meanwhile."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from sonde.errors import RunError, RunExists, SondeError
from sonde.store import layout
from sonde.store.remote import address as addresses
from sonde.store.remote.address import ObjectStore, assemble, spool_root
from sonde.store.remote.carrier import FOLDER, Carrier, Pace, adopt, read_state
from sonde.store.remote.follow import (
    LINGER_S,
    PROGRESS,
    Follower,
    Progress,
    Settings,
    has_live_writer,
    holding,
    read_progress,
)
from sonde.store.runs import numbers_in

logger = logging.getLogger("sonde")

_ANSWER_S: Final = 15.0
_POLL_S: Final = 0.05
_EXIT_S: Final = 5.0
_STAR: Final = "*"

_going_on: list[subprocess.Popen[bytes]] = []
"""Processes that carry on after their session, held so that nothing takes them for forgotten."""

T = TypeVar("T")


def address_of(path: Path) -> str | None:
    """Return the address that a folder of the spool is carried to; None for any other folder."""
    return addresses.address_below(spool_root(), path)


def local_place(run: str | os.PathLike[str], *, resume: bool, is_first: bool) -> str | os.PathLike[str]:
    """Return the folder to write for a run: its spool where it is an address in an object store.

    Args:
        run: The folder or address as the user named it. A star in its name stays; numbers that the store has are taken.
        resume: Whether a run that exists is to be continued: what the spool lacks is copied from the store.
        is_first: Whether this is the first rank, which refuses a run that exists.

    Raises:
        RunExists: The store has that run, and it was not to be continued.
        MissingExtra: The package that reaches the store is not installed.

    """
    address = addresses.as_address(run)
    if address is None:
        return run
    store = ObjectStore(address.rpartition("/")[0] if _STAR in address else address)
    path = addresses.below(spool_root(), address)
    try:
        if _STAR in address:
            _answer(lambda: _take_numbers(store, path, resume=resume), address)
        else:
            _answer(lambda: _settle_place(store, path, resume=resume, is_first=is_first), address)
    except SondeError:
        raise
    except OSError as error:
        logger.warning(
            "%s does not answer (%s: %s); recording into %s, which is carried up when it does.",
            *(address, type(error).__name__, error, path),
        )
    logger.info("recording into %s, which is carried to %s", path, address)
    return path


def _answer(question: Callable[[], T], address: str) -> T:
    """Return what the store answers, if it does so in time."""
    found: list[T] = []
    problems: list[BaseException] = []

    def ask() -> None:
        try:
            found.append(question())
        except (OSError, SondeError) as error:  # raised in the thread that waits
            problems.append(error)

    thread = threading.Thread(target=ask, name="sonde-remote", daemon=True)
    thread.start()
    thread.join(_ANSWER_S)
    if problems:
        raise problems[0]
    if not found:
        raise TimeoutError(f"{address} did not answer within {_ANSWER_S:.0f} s")
    return found[0]


def _take_numbers(store: ObjectStore, pattern: Path, *, resume: bool) -> bool:
    """Make empty folders for the highest number that the store has, so that it is not taken again."""
    folders, _ = store.list_level()
    known = numbers_in(pattern, folders)
    if known:
        last = pattern.with_name(known[max(known)])
        last.mkdir(parents=True, exist_ok=True)
        if resume:
            _settle_place(
                ObjectStore(f"{store.address}/{last.name}"),
                last,
                resume=True,
                is_first=True,
            )
    return True


def _settle_place(store: ObjectStore, path: Path, *, resume: bool, is_first: bool) -> bool:
    """Copy a run that is to be continued, if the spool lacks it; refuse one that is not."""
    is_known = (layout.rank_folder(path, 0) / layout.WRITER).is_file()
    if not is_known:
        try:
            store.get(layout.HEADER)
        except FileNotFoundError:
            return True
    if not resume and is_first:
        spool = f", and in the spool {path}" if is_known else ""
        raise RunExists(
            f"{store.address} holds a run already{spool}. Pass resume=True to continue it, or choose another address; "
            f"run={f'{store.address}-*'!r} takes the next free number."
        )
    if resume and not (path / layout.HEADER).is_file():
        pull(store, path)
    return True


def pull(store: ObjectStore, path: Path) -> None:
    """Copy a run from the store to a folder, unless another process has done so meanwhile."""
    path.mkdir(parents=True, exist_ok=True)
    with holding(path) as is_alone:
        deadline = time.monotonic() + _ANSWER_S
        while not is_alone and not (path / layout.HEADER).is_file() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if not is_alone or (path / layout.HEADER).is_file():
            return
        objects = store.objects()
        # The description last: a folder with one is complete.
        for name, pieces in sorted(assemble(objects).items(), key=lambda item: item[0] == layout.HEADER):
            target = path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            draft = target.with_name(f".{target.name}.pull")
            end = 0
            with draft.open("wb") as file:
                for piece in pieces:
                    file.write(store.get(piece.name)[end - piece.start :])
                    end = piece.end
            draft.replace(target)
        adopt(path, store.address, assemble(objects))


class CarrierProcess:
    """The process that carries a run; held by the session that writes it."""

    def __init__(self, spool: Path, address: str) -> None:
        self.spool, self.address = spool, address
        (spool / FOLDER / PROGRESS).unlink(missing_ok=True)  # that of an earlier attempt
        here = str(Path(__file__).parents[3])
        path = os.environ.get("PYTHONPATH", "")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "sonde.store.remote.follow", str(spool), address],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{path}" if path else here},
            start_new_session=True,  # Ctrl+C ends the training, and what it wrote is still carried
        )

    @classmethod
    def start(cls, spool: Path) -> CarrierProcess | None:
        """Start carrying a run, if its folder is one of the spool; a failure is logged."""
        address = address_of(spool)
        if address is None:
            return None
        try:
            return cls(spool, address)
        except OSError as error:
            logger.warning("%s is not carried to %s: %s. Later: sonde push %s", spool, address, error, spool)
            return None

    def close(self, wait_s: float | None = None) -> bool:
        """Wait for the rest to be carried, at most a stated time; log what is left, and return whether all is up.

        While other ranks of this machine still write, nothing waits: the last of them does.
        """
        with contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.write(b"e")
            self._process.stdin.close()
        if has_live_writer(self.spool):
            _going_on.append(self._process)
            return False
        deadline = time.monotonic() + (Settings.read().close_s if wait_s is None else wait_s)
        while not self._is_done() and not self._process.poll() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if not self._is_done():
            self._log_rest()
            _going_on.append(self._process)
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        return True

    def finish(self) -> None:
        """Do as `close` does, for as long as the environment says."""
        self.close()

    def _is_done(self) -> bool:
        progress = read_progress(self.spool)
        return progress is not None and progress.is_complete

    def _log_rest(self) -> None:
        progress = read_progress(self.spool)
        if progress is None:
            what, why = "nothing of it is up yet", ""
        else:
            what = f"{progress.left_files} files ({progress.left_bytes / 1e6:.1f} MB) are left"
            why = f" ({progress.error})" if progress.error else ""
        goes_on = self._process.poll() is None
        rest = f"Process {self._process.pid} tries on for {LINGER_S / 60:.0f} min; " if goes_on else ""
        logger.warning(
            "%s is not carried to %s completely: %s%s. %sto carry it later: sonde push %s",
            *(self.spool, self.address, what, why, rest, self.spool),
        )


def push(spool: Path, address: str | None = None, *, patience_s: float = 60.0) -> Progress:
    """Carry everything of a run that is not up yet, and return how far that came.

    Args:
        spool: The folder of the run.
        address: Where to; by default where it was carried before, or the address of its folder in the spool.
        patience_s: How long to try while the store does not answer.

    Raises:
        RunError: There is no address, or another process is carrying it.

    """
    state = read_state(spool)
    known = address or (state.address if state is not None else None) or address_of(spool)
    if known is None:
        raise RunError(f"{spool} has not been carried anywhere yet. Name an address: sonde push {spool} --to ADDRESS")
    settings = Settings.read()
    with holding(spool) as is_alone:
        if not is_alone:
            raise RunError(f"Another process is carrying {spool} to {known}.")
        carrier = Carrier(spool, ObjectStore(known), pace=Pace(settings.mb_per_s * (1 << 20) or None))
        Follower(carrier, every_s=0.0, linger_s=patience_s, wait=time.sleep).run()
    return read_progress(spool) or Progress(address=known)
