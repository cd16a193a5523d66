"""Killed at any moment, a run keeps every step it acknowledged."""

import random
import signal
import sys
import threading

import numpy as np
import pytest
from tests.store.making import make_block, write_run
from tests.waiting import PATIENCE_S, ask, started, wait_until

from sonde.store import layout, list_runs, open_run, verify

CHILD = """
import sys
from tests.store.making import *
path, first = sys.argv[1], int(sys.argv[2])
writer = RunWriter(path, HEADER, resume=True, journal_bytes=1 << 14, max_disk_bytes=1 << 30)
writer.take_sites([site for site in make_sites(6) if site.id >= len(writer.sites)])
for step in range(first, 1_000_000):
    writer.take_block(make_block(step, 6))
    sys.stdout.write(f"{step}\\n")
    sys.stdout.flush()
"""


def run_and_kill(path, first, lines):
    """Let a child write until it has acknowledged some steps, kill it, and return the last step it spoke of."""
    with started([sys.executable, "-c", CHILD, path, first]) as child:
        acknowledged = int(ask(child))
        for _ in range(lines - 1):
            acknowledged = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read()
    whole = [line for line in rest.split("\n")[:-1] if line]
    return int(whole[-1]) if whole else acknowledged


def test_no_acknowledged_step_is_lost(tmp_path):
    path, rng = tmp_path / "run", random.Random(7)
    first, kills = 0, 6
    for kill in range(kills):
        acknowledged = run_and_kill(path, first, rng.randint(1, 120))
        report = verify(path)
        assert report.ok, report
        run = open_run(path)
        assert run.status == "crashed"
        assert run.problems == []
        steps = run.steps.tolist()
        assert steps[: acknowledged + 1] == list(range(acknowledged + 1))
        # At most the step that was written when the signal came is there without having been spoken of.
        assert len(steps) <= acknowledged + 2
        assert len(run.attempts) == kill + 1
        assert list_runs(tmp_path)[0].last_step == steps[-1]
        first = steps[-1] + 1
    run = open_run(path)
    for number in (0, 5):
        wanted = [make_block(step, 6).rows[number][9] for step in range(first)]
        np.testing.assert_array_equal(run.series(run.sites[number], "mean").values, wanted)
    write_run(path, range(first, first + 3), 6, resume=True)
    assert open_run(path).steps.tolist() == list(range(first + 3))
    assert open_run(path).status == "finished"
    assert verify(path).ok


@pytest.mark.parametrize("first", [0, 40])
def test_a_journal_that_a_killed_process_had_only_begun_leaves_no_gap(tmp_path, first):
    path = tmp_path / "run"
    if first:
        with started([sys.executable, "-c", CHILD, path, 0]) as child:
            while int(child.stdout.readline()) < first:
                pass
            child.kill()
        first = int(open_run(path).steps[-1]) + 1
    folder = layout.rank_folder(path, 0)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / layout.journal_name(layout.list_folder(folder).next_number)).touch()
    for start in (first, first + 3):
        write_run(path, range(start, start + 3), 6, resume=True)
        assert verify(path).ok
    assert open_run(path).steps.tolist() == list(range(first + 6))


def test_a_noted_journal_that_is_empty_now_is_reported_and_does_not_stop_a_resumed_run(tmp_path):
    path = tmp_path / "run"
    with started([sys.executable, "-c", CHILD, path, 0]) as child:
        ask(child)
        child.kill()
    folder = layout.rank_folder(path, 0)
    (folder / layout.list_folder(folder).journals[-1][1]).write_bytes(b"")
    assert not verify(path).ok
    write_run(path, range(3), 6, resume=True)
    assert open_run(path).steps.tolist() == list(range(3))


def test_a_reader_in_another_process_follows_a_live_run(tmp_path):
    path = tmp_path / "run"
    with started([sys.executable, "-c", CHILD, path, 0]) as child:
        assert ask(child)
        run = open_run(path)
        last = -1
        for _ in range(150):
            acknowledged = int(child.stdout.readline())
            run.refresh()
            assert run.problems == []
            assert run.steps.tolist() == list(range(len(run.steps)))
            assert run.steps[-1] >= acknowledged
            assert run.steps[-1] >= last
            last = int(run.steps[-1])
            series = run.series("layer3.weight", "mean")
            assert series.steps.tolist() == run.steps.tolist()
            assert series.values[last] == make_block(last, 6).rows[3][9]
            assert len(run.at(last)) == 6
            assert len(run.at(0)) == 6
            if last % 10 == 0:
                assert verify(path).ok
        assert run.status == "live"
        child.kill()
    wait_until(lambda: run.status == "crashed")
    run.refresh()
    assert verify(path).ok


@pytest.mark.parametrize("state", ["finished", "failed"])
def test_how_a_run_ended_is_kept(tmp_path, state):
    writer = write_run(tmp_path / "run", range(2), close=False)
    writer.final_state = state
    writer.close()
    assert open_run(tmp_path / "run").status == state
    assert list_runs(tmp_path)[0].status == state


def test_a_run_can_be_asked_from_several_threads_while_it_is_written(tmp_path):
    writer = write_run(tmp_path / "run", range(1), close=False, journal_bytes=1 << 12)
    run, stop, wrong = open_run(tmp_path / "run"), threading.Event(), []

    def ask():
        while not stop.is_set():
            run.refresh()
            series = run.series("layer1.weight", "mean")
            wanted = [make_block(step).rows[1][9] for step in series.steps[-3:].tolist()]
            if series.values[-3:].tolist() != wanted or len(run.at(0)) != 3:
                wrong.append(series)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for step in range(1, 150):
        writer.take_block(make_block(step))
    writer.close()
    stop.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    run.refresh()
    assert not wrong
    assert run.steps.tolist() == list(range(150))
