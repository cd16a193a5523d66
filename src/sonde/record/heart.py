"""The heartbeat thread of a rank: reports progress, notices when there is none, and looks after the other ranks."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sonde.core import files, heartbeat
from sonde.core.heartbeat import Beat, State
from sonde.core.step_times import StepTimesFile
from sonde.record import standstill
from sonde.record.rank_progress import Now, Progress
from sonde.store import lease

logger = logging.getLogger("sonde")

LEAST_STUCK_S: Final = 30.0
"""Without an option, a rank is stuck after this long without progress, or three times its longest recent step."""
FIRST_STUCK_S: Final = 300.0
"""The same before the first steps have ended, when programs are compiled and data is loaded."""
_RECENT: Final = 64
_SHARE: Final = 0.02  # of the time, at most, for looking after the other ranks
_CLOSE_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """Which rank this is, and the constant parts of its beats."""

    rank: int
    world: int
    folder: Path
    device: str = ""
    stuck_after: float | None = None
    """Seconds without progress after which the rank counts as stuck. None: by its own steps."""
    memory: Callable[[], int | None] = lambda: None
    device_memory: Callable[[], int | None] = lambda: None
    module_names: Callable[[Any], str] = lambda module: ""
    """Returns the name of a watched module, or nothing."""


class Heart:
    """A thread that beats about once per second until `close`.

    Nothing here runs in the training thread, and no fault here reaches it: one that lasts is logged once.
    """

    def __init__(
        self,
        about: About,
        progress: Progress,
        look: Callable[[bool], None] | None = None,
        *,
        interval: float | None = None,
    ) -> None:
        self._about = about
        self._progress = progress
        self._look = look
        self._interval = heartbeat.interval_for(about.world) if interval is None else interval
        self._times = StepTimesFile(about.folder)
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._host, self._pid = socket.gethostname(), os.getpid()
        self._start = lease.process_start(self._pid) or ""
        self._stuck_at: float | None = None
        self._module = ""
        self._ends = threading.Event()
        self._reported: set[str] = set()
        self._next_look = 0.0
        self._offset = time.time() - time.perf_counter()
        self._thread = threading.Thread(target=self._run, name="sonde-heartbeat", daemon=True)

    def start(self) -> None:
        """Write the first beat and start the thread."""
        self._thread.start()

    def close(self, state: State) -> None:
        """Write a last beat with how the training ended, look at the others once more, and end the thread."""
        self._ends.set()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            return
        self._try("the last heartbeat", lambda: self._beat(state))
        self._try("the times of the last steps", self._times.close)

    def _run(self) -> None:
        while True:
            self._try("the heartbeat", lambda: self._beat("live"))
            self._try("looking after the other ranks", self._look_if_due)
            if self._ends.wait(self._interval):
                break
        if self._look is not None:
            self._try("looking after the other ranks", lambda: self._look(True))  # type: ignore[misc] # checked above

    def _try(self, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - the edge of this thread: a full disk must not end it
            if what not in self._reported:
                self._reported.add(what)
                logger.warning("%s failed; training continues: %s: %s", what, type(error).__name__, error)

    # ------------------------------------------------------------------ a beat

    def _beat(self, state: State) -> None:
        about, now = self._about, self._progress.now()
        done = self._progress.take()
        self._recent.extend(sum(seconds.values()) for _, _, seconds in done)
        limit = self._limit()
        clock = time.perf_counter()
        is_stuck = state == "live" and clock - now.since >= limit
        if is_stuck and self._stuck_at != now.since:
            self._stuck_at = now.since
            self._try("writing the stacks", lambda: self._write_stop(now))
        heartbeat.write(
            about.folder,
            Beat(
                rank=about.rank,
                world=about.world,
                host=self._host,
                pid=self._pid,
                process_start=self._start,
                time=self._offset + clock,
                interval=self._interval,
                state=state,
                step=now.step,
                phase=now.phase,
                since=self._offset + now.since,
                stuck_after=limit,
                collective=now.collective,
                collectives=now.collectives,
                module=self._module if is_stuck else "",
                where=standstill.users_line(now.thread),
                device=about.device,
                memory=about.memory(),
                device_memory=about.device_memory(),
                stacks=is_stuck,
            ),
        )
        self._times.append(done)

    def _limit(self) -> float:
        if self._about.stuck_after is not None:
            return self._about.stuck_after
        return max(LEAST_STUCK_S, 3 * max(self._recent)) if self._recent else FIRST_STUCK_S

    def _write_stop(self, now: Now) -> None:
        """Write where this rank is stuck; once per stop, each replacing the one before."""
        folder = self._about.folder
        self._module = standstill.module_of(now.thread, self._about.module_names)
        standstill.write_stacks(folder / heartbeat.STACKS)
        entries = standstill.flight_recorder()
        if entries:
            files.write(folder / heartbeat.COLLECTIVES, {"entries": entries}, sync=False)

    def _look_if_due(self) -> None:
        began = time.perf_counter()
        if self._look is None or began < self._next_look:
            return
        self._look(False)
        took = time.perf_counter() - began
        self._next_look = began + max(self._interval, took / _SHARE)
