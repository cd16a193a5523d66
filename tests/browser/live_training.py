"""A training in a process of its own that goes on as far as it is told to."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import PATIENCE_S, ask, started


class LiveTraining:
    """What a test tells the training."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def train(self, steps: int) -> None:
        """Let it go on for some steps, and wait until they are written."""
        assert ask(self.process, str(steps)) == f"at {steps}\n"

    def finish(self) -> None:
        """Let it come to its end."""
        assert self.process.stdin
        self.process.stdin.close()
        assert self.process.wait(PATIENCE_S) == 0

    def kill(self) -> None:
        """Let it die."""
        self.process.kill()
        self.process.wait(PATIENCE_S)


@contextmanager
def live_training(run: Path) -> Iterator[LiveTraining]:
    """Start a training that waits to be told how far to go."""
    with started([sys.executable, Path(__file__).with_name("trained_live.py"), run]) as process:
        try:
            yield LiveTraining(process)
        finally:
            process.kill()
