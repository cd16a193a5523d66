"""kill -9 at random moments: whatever was acknowledged is there, and a resumed run only ever appends."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
from tests.waiting import forking, is_alive, wait_until, whole_lines

import sonde

KILLS = int(os.environ.get("SONDE_KILLS", "20"))
KILLS_PER_RUN = 5 if KILLS <= 50 else 40  # enough steps for old ones to be thinned


@pytest.fixture
def fork_training():
    with forking(Path(__file__).with_name("zygote.py")) as fork:
        yield fork


def acknowledged(path):
    return [line.split() for line in whole_lines(Path(f"{path}.acked"))]


@pytest.mark.timeout(300 * max(1, KILLS // 50))
def test_nothing_acknowledged_is_lost_in_many_kills(tmp_path, fork_training):
    chance = random.Random(7)
    for kill in range(KILLS):
        # Some kills start a new run; the others resume it, so that crashes pile up in one folder.
        path = tmp_path / f"run{kill // KILLS_PER_RUN}"
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
    for step, loss in lines:
        at = losses.steps.searchsorted(int(step), side="right") - 1
        assert losses.steps[at] <= int(step) < losses.steps[at] + losses.spans[at]
        if losses.spans[at] == 1:
            assert losses.values[at] == pytest.approx(float(loss), rel=1e-6)
    steps = [int(step) for step, _ in lines]
    assert steps == sorted(set(steps)), "a resumed run numbers its steps on"
    report = sonde.verify(path)
    assert report.ok, report.problems
