"""kill -9 at random moments: whatever was acknowledged is there, and a resumed run only ever appends."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import sonde

KILLS = 50
ZYGOTE = Path(__file__).with_name("zygote.py")


@pytest.fixture
def fork_training():
    process = subprocess.Popen(
        [sys.executable, str(ZYGOTE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    children = []

    def fork(path):
        process.stdin.write(f"{path}\n")
        process.stdin.flush()
        children.append(int(process.stdout.readline()))
        return children[-1]

    yield fork
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=30)


def wait_until(condition, what):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"


def acknowledged(path):
    text = Path(f"{path}.acked").read_text() if Path(f"{path}.acked").exists() else ""
    return [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_nothing_acknowledged_is_lost_in_fifty_kills(tmp_path, fork_training):
    chance = random.Random(7)
    for kill in range(KILLS):
        # Every fifth kill starts a new run; the others resume it, so that crashes pile up in one folder.
        path = tmp_path / f"run{kill // 5}"
        before = len(acknowledged(path))
        pid = fork_training(path)
        wanted = before + chance.randrange(1, 12)
        wait_until(lambda path=path, wanted=wanted: len(acknowledged(path)) >= wanted, "acknowledged steps")
        for _ in range(chance.randrange(20_000)):
            pass  # a random moment within a step
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: not is_alive(pid), "the end of the process")
        check(path)


def check(path):
    run = sonde.open_run(path)
    assert run.status == "crashed"
    lines = acknowledged(path)
    losses = run.series("loss:scalar", "mean")
    recorded = dict(zip(losses.steps.tolist(), losses.values.tolist(), strict=True))
    for step, loss in lines:
        assert recorded[int(step)] == pytest.approx(float(loss), rel=1e-6)
    steps = [int(step) for step, _ in lines]
    assert steps == sorted(set(steps)), "a resumed run numbers its steps on"
    report = sonde.verify(path)
    assert report.ok, report.problems
