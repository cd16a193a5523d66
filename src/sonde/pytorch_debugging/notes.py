"""The run that a debugger writes into: opened at its first word, in a folder of its own under the log directory."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from sonde.errors import ClosedError, OptionError, RunError
from sonde.records import Finding, Quantity, Reading
from sonde.session import IdleSession, Session
from sonde.watching import open_session, watch

logger = logging.getLogger("sonde")


class Notes:
    """Writes events, numbers and readings. Without a watched model, checking the same thing again is the next step."""

    def __init__(self, log_dir: Path, config: Mapping[str, Any]) -> None:
        self.path: Path | None = None
        """The run's folder, once there is something in it."""
        self._log_dir = log_dir
        self._config = dict(config)
        self._session: Session | None = None
        self._watches = False
        self._seen: set[Quantity] = set()
        self._findings: list[Finding] = []

    def watch(self, model: nn.Module) -> Session:
        """Open the run and watch a model: its steps are then those of its optimizer."""
        self.close()
        self._watches = True
        self._session = watch(model, run=self._new_folder(), rank=0, config=self._config)
        return self._session

    def event(self, event_type: str, message: str, data: Mapping[str, Any]) -> None:
        """Note an event."""
        with _unless_closed():
            self._ready().event(event_type, message, data)

    def log(self, **scalars: float) -> None:
        """Note numbers of this step."""
        with _unless_closed():
            self._ready().log(**scalars)

    def readings(self, quantity: Quantity, readings: Mapping[str, Reading]) -> None:
        """Note readings of this step, unless the session takes them itself."""
        if self._watches:
            return
        if quantity in self._seen:
            self.end_step()
        self._seen.add(quantity)
        with _unless_closed():
            session = self._ready()
            for name, reading in readings.items():
                session.record(name, reading, quantity=quantity)

    def end_step(self) -> None:
        """End the step, unless an optimizer does."""
        if not self._watches and self._seen:
            self._seen.clear()
            with _unless_closed():
                self._ready().step()

    @property
    def findings(self) -> list[Finding]:
        """What the session found wrong with a watched model."""
        return list(self._findings if self._session is None else self._session.findings)

    @property
    def held_bytes(self) -> int:
        """How much memory the session holds."""
        return 0 if self._session is None else self._session.held_bytes

    def flush(self) -> None:
        """Wait until what was noted so far is written and judged."""
        if self._session is not None:
            with _unless_closed():
                self._session.flush()

    def close(self, error: BaseException | None = None) -> None:
        """Finish the run, as failed if an error ended it; a later word opens another one."""
        session, self._session = self._session, None
        self._watches = False
        self._seen.clear()
        if session is not None:
            session.__exit__(None if error is None else type(error), error, None)
            self._findings = list(session.findings)

    def _ready(self) -> Session:
        if self._session is None:
            try:
                # Each debugger of a distributed program has a folder of its own, in which it is the first rank.
                self._session = open_session(run=self._new_folder(), rank=0, config=self._config)
            except (OSError, RunError) as error:
                # In the middle of somebody's training; what is kept in memory still makes a report.
                logger.warning(
                    "no run is written to %s: %s. Free the disk or choose another log_dir.", self._log_dir, error
                )
                self._session = IdleSession(self._log_dir)
                self.path = None
        return self._session

    def _new_folder(self) -> Path:
        self.path = next(_free_folders(self._log_dir))
        return self.path


def made_folder(log_dir: Any) -> Path:
    """Return the folder, which is created if it does not exist."""
    if not isinstance(log_dir, str | os.PathLike):
        raise OptionError(f"log_dir takes a path; got {log_dir!r}.")
    folder = Path(log_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise OptionError(f"log_dir={str(folder)!r} is no folder: a file is in the way. Choose another.") from None
    except OSError as error:
        raise OptionError(f"log_dir={str(folder)!r} cannot be made: {error.strerror}. Choose another.") from None
    return folder


def _unless_closed() -> contextlib.AbstractContextManager[None]:
    # In a forked child the session is closed: the run belongs to the parent, and nothing is noted.
    return contextlib.suppress(ClosedError)


def _free_folders(log_dir: Path) -> Iterator[Path]:
    """Make and yield folders `run-0001`, `run-0002`, ... that nobody else has."""
    log_dir.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(path.name[4:]) for path in log_dir.glob("run-*") if path.name[4:].isdigit()), default=0)
    while True:
        path = log_dir / f"run-{number:04}"
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
            continue
        yield path
