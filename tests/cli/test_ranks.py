"""`sonde ranks`, and `--rank` of the verbs that read a run."""

from __future__ import annotations

import json
import socket
import time

import pytest
from tests.parallel.made_ranks import write_beat, write_hang, write_ranks

import sonde as package
from sonde.core import heartbeat
from sonde.core.heartbeat import Beat
from sonde.store import layout


@pytest.fixture
def run(tmp_path):
    write_ranks(tmp_path / "run")
    return tmp_path / "run"


def test_ranks_are_listed_with_their_times_and_the_slow_one_first(run, sonde):
    for rank in range(3):
        write_beat(run, rank)
    result = sonde("ranks", run, "--width", 140)
    assert result.exit_code == 2, "it costs more than a quarter of a step"
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["3", "ranks", "3", "running"]
    assert "Rank 1 makes the other ranks wait in almost every step: its data_wait takes 51 ms" in result.stdout
    rows = [line.split() for line in lines if line.split()[:1] in (["0"], ["1"], ["2"])]
    assert [row[0] for row in rows] == ["1", "0", "2"]
    assert [row[6:10] for row in rows[:2]] == [["74.0", "ms", "0.0", "ms"], ["24.0", "ms", "50.0", "ms"]]
    assert "elsewhere" in lines[-1]


def test_a_stuck_rank_is_distinguished_from_those_that_wait(run, sonde):
    write_hang(run)
    result = sonde("ranks", run, "--stacks", "--width", 140)
    assert result.exit_code == 2
    text = " ".join(result.stdout.split())
    assert "Ranks 0 and 1 have waited for 90 s in all_reduce (its call 7 of torch.distributed) after step 41." in text
    assert "Rank 2 never came: it has been in data_wait at train.py:12 in load for 95 s." in text
    assert "Thread 1: in load" in text
    told = json.loads(sonde("ranks", run, "--json").stdout)
    assert [row["condition"] for row in told["ranks"]] == ["waiting", "waiting", "stuck"]
    assert told["findings"][0]["data"]["stacks"] == {"2": "Thread 1: in load\n"}


def test_a_rank_whose_process_is_gone_is_dead_and_one_that_fell_silent_elsewhere_too(run, sonde):
    write_beat(run, 0)
    write_beat(run, 1, host=socket.gethostname(), pid=2**22 + 1)
    write_beat(run, 2)
    told = json.loads(sonde("ranks", run, "--json").stdout)
    assert [row["condition"] for row in told["ranks"]] == ["running", "died", "running"]
    assert "is gone" in told["findings"][0]["cause"]
    late = time.time() - 60
    silent = Beat(rank=2, world=3, host="elsewhere", pid=1, time=late, since=late, step=12, phase="backward")
    heartbeat.write(layout.rank_folder(run, 2), silent)
    told = json.loads(sonde("ranks", run, "--json").stdout)
    assert [row["condition"] for row in told["ranks"]] == ["running", "died", "died"]


def test_a_rank_that_ended_while_others_wait_for_it_is_named(run, sonde):
    write_beat(run, 0, phase="communication", since=40)
    write_beat(run, 1, phase="communication", since=40)
    write_beat(run, 2, state="finished", step=39)
    told = json.loads(sonde("ranks", run, "--json").stdout)
    assert "Rank 2 never came: it ended its session (finished) after step 39." in told["findings"][0]["cause"]


def test_ranks_in_different_collectives_are_reported(run, sonde):
    write_beat(run, 0, phase="communication", since=40, collective="all_reduce", collectives=9)
    write_beat(run, 1, phase="communication", since=40, collective="all_reduce", collectives=9)
    write_beat(run, 2, phase="communication", since=40, collective="broadcast", collectives=8)
    told = json.loads(sonde("ranks", run, "--json").stdout)
    assert "Rank 2 waits in another collective, broadcast" in told["findings"][0]["cause"]


def test_ranks_that_all_wait_or_all_compute_for_long_are_no_hang(run, sonde):
    for rank in range(3):
        write_beat(run, rank, phase="forward", since=500)
    told = json.loads(sonde("ranks", run, "--json").stdout)
    assert [finding["kind"] for finding in told["findings"]] == ["slow_rank"]


def test_a_run_of_one_process_has_no_ranks_to_show(tmp_path, sonde):
    with package.open_session(run=tmp_path / "one") as session:
        session.step()
    result = sonde("ranks", tmp_path / "one")
    assert result.exit_code == 0
    assert "no heartbeats" in result.stdout


def test_one_rank_is_shown_diagnosed_and_exported_by_itself(run, sonde, tmp_path):
    shown = json.loads(sonde("show", run, "--site", "extra", "--step", "40", "--rank", "2", "--json").stdout)
    assert [each["mean"] for each in shown["readings"]] == [59.0]
    assert json.loads(sonde("diagnose", run, "--rank", "1", "--json").stdout)["steps"] == 40
    result = sonde("export", run, "--to", "csv", "--out", "-", "--site", "extra", "--stat", "mean", "--rank", "2")
    assert [float(line.split(",")[-1]) for line in result.stdout.splitlines()[1:]] == [
        20.0 + step for step in range(40)
    ]
    assert "has no rank 7; it has 3 ranks, 0 to 2" in sonde("show", run, "--rank", "7").stderr
