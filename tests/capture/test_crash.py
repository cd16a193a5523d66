"""kill -9 in the middle of an epoch: all that was acknowledged is there, and resuming completes it."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
from tests.waiting import forking, is_alive, wait_until, whole_lines

from sonde.store.pages import load_debug_outputs, verify_pages

KILLS = 5
COUNT = 400


@pytest.fixture(scope="module")
def fork_evaluation():
    with forking(Path(__file__).with_name("zygote.py")) as fork:
        yield lambda kind, path, most=2 * COUNT: fork(f"{kind} {most} {path}")


def acknowledged(path):
    return whole_lines(Path(f"{path}.acked"))


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
        before, more = len(acknowledged(path)), chance.randrange(1, 60)
        pid = fork_evaluation(kind, path, more + 15)
        wait_until(lambda wanted=before + more: len(acknowledged(path)) >= wanted, "acknowledged captures")
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
    from sonde.store.pages.open_page import read_journal

    return sum(len(read_journal(index)[0]) for index in path.glob("*.index"))
