"""Waiting for what moves on its own: other processes and threads, which no injected clock can hurry."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

PATIENCE_S = 240.0
"""For bounds that only guard against hanging: below the suite's own limit, far above what a busy machine needs."""
ENDING_S = 30.0
"""How long a process may take to end once its input is closed, before it is killed."""


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


def _tree(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return a process and what it has started; nothing if it has ended, since its number may be another's by now."""
    if process.poll() is not None:
        return []
    root = psutil.Process(process.pid)
    return [root, *root.children(recursive=True)]


def _kill(tree: list[psutil.Process]) -> None:
    for each in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


def kill_marked(name: str, value: str) -> None:
    """Kill the processes that were started with a value in their environment, but for this one and its parents."""
    mine = {os.getpid(), *(each.pid for each in psutil.Process().parents())}
    mark = f"{name}={value}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(folder.name) not in mine and mark in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
        except OSError:  # ended, or another user's
            continue


def let_forks_die_with_this_process() -> None:
    """Have processes that the main thread forks killed when it ends: they hold the pipe that pytest-xdist reads."""
    libc = ctypes.CDLL(None)
    is_main = True

    def before() -> None:
        nonlocal is_main
        is_main = threading.current_thread() is threading.main_thread()

    def after() -> None:
        if is_main:  # the kernel would kill a fork of another thread as soon as that thread ends
            libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    os.register_at_fork(before=before, after_in_child=after)


@contextlib.contextmanager
def started(command: Sequence[object], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a process whose standard input and output are pipes; with the block, end it and all it has started.

    It stays in the process group of the tests, so that whatever ends that group, such as `timeout`, ends it too.
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(list(map(str, command)), **pipes | options) as process:
        tree: list[psutil.Process] = []
        try:
            yield process
            tree = _tree(process)  # its children lose their parent when it ends
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(ENDING_S)
        finally:
            _kill(tree or _tree(process))


def ask(process: subprocess.Popen[str], question: str | None = None, patience_s: float | None = None) -> str:
    """Send a line to a process, and return the line that it answers; kill it if none comes in time."""
    assert process.stdout is not None
    if question is not None:
        assert process.stdin is not None
        process.stdin.write(f"{question}\n")
        process.stdin.flush()
    guard = threading.Timer(patience_s or PATIENCE_S, lambda: _kill(_tree(process)))
    guard.daemon = True
    guard.start()
    try:
        answer = process.stdout.readline()
    finally:
        guard.cancel()
    assert answer, f"{process.args} ended or was killed before it answered"
    return answer


def run_to_end(
    command: Sequence[object], *, input: str | bytes | None = None, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a command and return what it wrote, as `subprocess.run` does; if it takes too long, kill all it started.

    `subprocess.run` kills only the process itself: the ranks of a launcher would go on, and hold its pipes.
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(list(map(str, command)), **pipes | options) as process:
        try:
            out, err = process.communicate(input, timeout=PATIENCE_S)
        finally:
            _kill(_tree(process))
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def code_state() -> str:
    """Return the commit that is tested, with a mark if something was changed since: for figures of long campaigns."""
    command = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


@contextlib.contextmanager
def forking(script: Path) -> Iterator[Callable[[str], int]]:
    """Start a script that forks a child for each line it reads; hand out a function that sends one and returns a pid.

    So torch is imported once for many children. Those that are left at the end are killed.
    """
    with started([sys.executable, script], stderr=subprocess.DEVNULL) as process:
        yield lambda order: int(ask(process, order))
