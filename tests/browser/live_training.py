"""A training in a process of its own that goes on as far as it is told to."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class LiveTraining:
    """What a test tells the training."""

    def __init__(self, run: Path) -> None:
        script = Path(__file__).with_name("trained_live.py")
        command = [sys.executable, str(script), str(run)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def train(self, steps: int) -> None:
        """Let it go on for some steps, and wait until they are written."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == f"at {steps}\n"

    def finish(self) -> None:
        """Let it come to its end."""
        assert self.process.stdin
        self.process.stdin.close()
        assert self.process.wait(120) == 0

    def kill(self) -> None:
        """Let it die."""
        self.process.kill()
        self.process.wait()


@contextmanager
def live_training(run: Path) -> Iterator[LiveTraining]:
    """Start a training that waits to be told how far to go."""
    training = LiveTraining(run)
    with training.process:
        try:
            yield training
        finally:
            training.kill()
