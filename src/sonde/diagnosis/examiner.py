"""Start the experiments on a taped step at the end of a run that looks ill, in a separate background process."""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path
from typing import Final

from sonde.core import examination, tape
from sonde.core.examination import BUSY, GRACE, SECONDS
from sonde.diagnosis.case import Case
from sonde.errors import RunDamaged
from sonde.records import Finding

logger = logging.getLogger("sonde")

MOST: Final = 3
"""How many tapes of a run are examined by themselves."""
PATIENCE: Final = BUSY * SECONDS + GRACE
"""Seconds after which a process must have ended."""
VARIABLE: Final = "SONDE_EXAMINE"
"""Environment: `0` never examines by itself, `wait` lets the end of a session wait for the results."""


class Examiner:
    """Starts processes that examine tapes of a run, one at a time, and hands their results to the case."""

    def __init__(self, run: Path) -> None:
        self._run = run
        mode = os.environ.get(VARIABLE, "1")
        self._left = 0 if mode == "0" else MOST
        self.waits = mode == "wait"
        """Whether the end of a session waits for the results."""
        self._process: subprocess.Popen[bytes] | None = None
        self._started: set[Path] = set()

    def look(self, case: Case, findings: list[Finding]) -> bool:
        """Take results that have come, start an examination if the run looks ill, and return whether any came."""
        if self._process is not None and self._process.poll() is None:
            return False
        news = self._process is not None and self._take(case)
        self._process = None
        if self._left > 0 and is_suspicious(case, findings):
            self._start()
        return news

    def finish(self, case: Case, findings: list[Finding]) -> bool:
        """Return whether results came, at the end of the run. Waits for them only if that was asked for."""
        news = self.look(case, findings)
        while self.waits and self._process is not None:
            try:
                self._process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            news = self.look(case, findings) or news
        return news

    def _start(self) -> None:
        """Examine the first tape, then the last: how the run began, and how it is now."""
        known = list(tape.folders(self._run).values())
        waiting = [folder for folder in dict.fromkeys([*known[:1], *known[-1:]]) if folder not in self._started]
        if not waiting:
            return
        self._left -= 1
        self._started.add(waiting[0])
        try:
            self._process = examination.start(waiting[0])
        except OSError as error:
            self._left = 0
            logger.info("the tape %s is not examined: %s", waiting[0], error)

    def _take(self, case: Case) -> bool:
        found = False
        for folder in self._started:
            try:
                result = examination.read(folder)
            except (RunDamaged, OSError):
                continue
            if result is not None and result.step not in case.examinations:
                case.take_examination(result)
                found = True
        return found


def is_suspicious(case: Case, findings: list[Finding]) -> bool:
    """Return whether a run looks ill enough to repeat a step: a warning, or a loss that does not fall."""
    return case.learning.failed or any(finding.severity != "info" for finding in findings)
