"""kill -9 in the middle of an epoch: all that was acknowledged is there, and resuming completes it."""

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

from sonde.store.pages import load_debug_outputs, verify_pages

KILLS = 5
COUNT = 400
ZYGOTE = Path(__file__).with_name("zygote.py")


@pytest.fixture(scope="module")
def fork_evaluation():
    process = subprocess.Popen(
        [sys.executable, str(ZYGOTE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    children = []

    def fork(kind, path):
        process.stdin.write(f"{kind} {path}\n")
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
    file = Path(f"{path}.acked")
    text = file.read_text() if file.exists() else ""
    return [line.strip() for line in text.splitlines(keepends=True) if line.endswith("\n")]


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def check(path):
    read = load_debug_outputs(path)
    assert not read.problems
    for at in map(int, acknowledged(path)):
        outputs = read[at]
        assert outputs["map"].shape == (3, 40 + at % 7)
        assert (outputs["map"] == at).all()
        assert outputs["stats"] == {"at": at, "mean": at / 3}
        assert outputs["odd"] == (at % 2 == 1,)
        assert read.info(at) == {"score": at}
    report = verify_pages(path)
    assert report.ok, report.problems


@pytest.mark.parametrize("kind", ["writer", "capture"])
def test_nothing_acknowledged_is_lost_and_resuming_completes_the_epoch(tmp_path, fork_evaluation, kind):
    chance = random.Random(11)
    path = tmp_path / "debugger"
    for _ in range(KILLS):
        before = len(acknowledged(path))
        pid = fork_evaluation(kind, path)
        wanted = before + chance.randrange(1, 60)
        wait_until(lambda wanted=wanted: len(acknowledged(path)) >= wanted, "acknowledged captures")
        for _ in range(chance.randrange(20_000)):
            pass  # a random moment within a capture
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: not is_alive(pid), "the end of the process")
        check(path)
    pid = fork_evaluation(kind, path)
    wait_until(lambda: acknowledged(path)[-1:] == ["done"], "the end of the epoch")
    wait_until(lambda: not is_alive(pid), "the end of the process")
    lines = [int(word) for word in acknowledged(path) if word != "done"]
    assert len(lines) == len(set(lines)), "what was acknowledged once is not captured again"
    read = load_debug_outputs(path)
    assert list(read) == list(range(COUNT))
    assert not list(path.glob("*.open"))
    assert num_records(path) == COUNT, "no capture is stored twice"
    assert verify_pages(path).ok


def test_captures_are_finished_at_exit(tmp_path, fork_evaluation):
    pid = fork_evaluation("forgetful", tmp_path / "debugger")
    wait_until(lambda: not is_alive(pid), "the end of the process")
    assert len(load_debug_outputs(tmp_path / "debugger")) == 50
    assert not list(tmp_path.rglob("*.open"))


def num_records(path):
    from sonde.store.pages.file import read_journal

    return sum(len(read_journal(index)[0]) for index in path.glob("*.index"))
