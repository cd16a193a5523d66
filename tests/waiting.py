"""Waiting for what moves on its own: other processes and threads, which no injected clock can hurry."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PATIENCE_S = 240.0
"""For bounds that only guard against hanging: below the suite's own limit, far above what a busy machine needs."""


def wait_until(condition: Callable[[], object], what: str = "it") -> None:
    """Look again and again until a condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.002)


def is_alive(pid: int) -> bool:
    """Return whether any thread of a process runs; a process that only waits for its parent does not.

    The first thread can be gone while others still end: until then the process holds its files and their locks.
    """
    try:
        return any(_state(each) != "Z" for each in Path(f"/proc/{pid}/task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return False


def _state(task: Path) -> str:
    """Return the letter of a thread's state; a thread that has just gone counts as ended."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def whole_lines(file: Path) -> list[str]:
    """Return the lines of a file that another process appends to, less one that it has only begun."""
    text = file.read_text() if file.exists() else ""
    return [line.rstrip("\n") for line in text.splitlines(keepends=True) if line.endswith("\n")]


@contextlib.contextmanager
def forking(script: Path) -> Iterator[Callable[[str], int]]:
    """Start a script that forks a child for each line it reads; hand out a function that sends one and returns a pid.

    So torch is imported once for many children. Those that are left at the end are killed.
    """
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    children: list[int] = []

    def fork(order: str) -> int:
        process.stdin.write(f"{order}\n")
        process.stdin.flush()
        children.append(int(process.stdout.readline()))
        return children[-1]

    try:
        yield fork
    finally:
        for pid in filter(is_alive, children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=PATIENCE_S)
