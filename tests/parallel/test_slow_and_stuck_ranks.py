"""Real ranks over gloo: the one that is slow, stuck or dead is named while the others still run."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
from tests.parallel.many_ranks import many_ranks
from tests.waiting import wait_until, whole_lines

import sonde
from sonde.records import Finding
from sonde.store.ranks import collectives_of, rank_times, read_beats, standing_of

TRAINING = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        {in_forward}
        return self.head(self.body(x))

def batches():
    for number in range({steps}):
        {in_loader}
        yield torch.randn(4, 8, device=device) + rank

model = nn.parallel.DistributedDataParallel(Net().to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session = sonde.watch(model, optimizer, run=folder, stuck_after=1.0, what="gradients", every=10, tape=False)
with session:
    for x in session.loading(batches()):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        {before_backward}
        loss.backward()
        optimizer.step()
        time.sleep(0.01)
        {after_step}
"""
SLOW = {
    "loader": ("in_loader", "time.sleep(0.15 * (rank == 1))", "data_wait", True),
    "forward": ("in_forward", "time.sleep(0.15 * (rank == 1))", "forward", True),
    "backward": ("before_backward", "loss.register_hook(lambda g: time.sleep(0.15 * (rank == 1)))", "backward", True),
    "sometimes": ("after_step", "time.sleep(0.5 * (rank == 1 and session.current_step % 4 == 0))", "other", False),
    "nobody": ("after_step", "pass", "", False),
}


def program(place="after_step", code="pass", steps=50):
    empty = dict.fromkeys(("in_forward", "in_loader", "before_backward", "after_step"), "pass")
    return TRAINING.format(**empty | {place: code}, steps=steps)


@pytest.fixture(scope="module")
def start_ranks():
    with many_ranks() as start:
        yield start


@pytest.fixture(scope="module")
def slow_runs(start_ranks, tmp_path_factory):
    """Start all programs with a slow rank at once: they sleep most of the time. Return their processes by folder.

    They train until they are ended, because nobody knows how many steps a busy machine needs.
    """
    folder = tmp_path_factory.mktemp("slow")
    steps = {"nobody": 50}
    return {
        folder / name: start_ranks(program(place, code, steps.get(name, 100_000)), folder / name, 3)
        for name, (place, code, _, _) in SLOW.items()
    }


def found_in(run, kind):
    """Return the findings of a kind that the monitor of rank 0 has written so far."""
    every = [Finding.from_json(json.loads(line)) for line in whole_lines(run / "findings.jsonl")]
    return [finding for finding in every if finding.kind == kind]


def wait_for(run, kind):
    wait_until(lambda: found_in(run, kind) or is_over(run), kind)
    found = found_in(run, kind)
    assert found, (run.parent / f"{run.name}.log0").read_text()
    return found[-1]


def is_over(run):
    """Return whether all ranks have ended their sessions, and written everything."""
    ended = {beat.rank for beat in read_beats(run).values() if beat.state != "live"}
    return ended == {0, 1, 2} and sonde.open_run(run).status != "live"


@pytest.mark.parametrize("name", [name for name in SLOW if name != "nobody"])
def test_a_slow_rank_is_named_live_with_its_phase(slow_runs, name):
    _, _, phase, is_constant = SLOW[name]
    run = next(run for run in slow_runs if run.name == name)
    finding = wait_for(run, "slow_rank")
    for pid in slow_runs[run]:
        os.kill(pid, signal.SIGKILL)
    assert finding.sites == ("rank 1",)
    assert (finding.data["phase"], finding.data["constant"]) == (phase, is_constant), finding.cause
    later = {each.kind: each for each in sonde.diagnose(run).findings}["slow_rank"]
    assert (later.sites, later.data["phase"]) == (("rank 1",), phase)
    known = {item.name: item.value for item in later.evidence}
    # On a busy machine other ranks are late too, which leaves less to save.
    assert 0 < known["seconds of a step without it"] < known["seconds of a step"] - 0.005


def test_equal_ranks_are_not_called_slow(slow_runs):
    run = next(run for run in slow_runs if run.name == "nobody")
    wait_until(lambda: is_over(run), "its end")
    assert "slow_rank" not in {each.kind for each in sonde.diagnose(run).findings}
    assert rank_times(run).spent.shape[:2] == (3, 49), "every step of every rank but the first"


def test_a_rank_that_never_enters_a_collective_is_named_with_its_stack(start_ranks, tmp_path):
    code = "time.sleep(1000 * (rank == 2 and session.current_step == 6))"
    start_ranks(program("in_forward", code), tmp_path / "run", 3)
    wait_for(tmp_path / "run", "stuck_rank")
    wait_until(lambda: found_in(tmp_path / "run", "stuck_rank")[-1].data["stacks"], "the stacks")
    finding = found_in(tmp_path / "run", "stuck_rank")[-1]
    assert (finding.data["missing"], finding.data["waiting"]) == ([2], [0, 1])
    assert finding.step == 5
    assert "Rank 2 never came: it has been in forward" in finding.cause
    assert "all_reduce" in finding.cause or "a collective" in finding.cause
    assert "in forward" in finding.data["stacks"]["2"]
    standing = standing_of(tmp_path / "run", time.time())
    assert standing.those("waiting") == [0, 1]
    assert standing.those("stuck") == standing.behind == [2]
    assert standing.beats[2].module == "(model)"


def test_a_rank_that_died_is_distinguished_from_one_that_is_stuck(start_ranks, tmp_path):
    # Without DDP, so that the others have nothing to wait for: their sockets would report the death themselves.
    code = """
model = nn.Linear(8, 2, device=device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with sonde.watch(model, optimizer, run=folder, stuck_after=300.0) as session:
    for step in range(100_000):
        model(torch.randn(4, 8, device=device)).sum().backward()
        optimizer.step()
        time.sleep(0.02)
        if rank == 1 and step == 40:
            os.kill(os.getpid(), 9)
"""
    start_ranks(code, tmp_path / "run", 3)
    finding = wait_for(tmp_path / "run", "dead_rank")
    assert finding.sites == ("rank 1",)
    assert "process" in finding.cause
    standing = standing_of(tmp_path / "run", time.time())
    assert standing.those("died") == [1]
    assert not standing.those("stuck")
    assert not found_in(tmp_path / "run", "stuck_rank")


def test_collectives_called_by_hand_are_counted_and_named(start_ranks, tmp_path):
    code = """
model = nn.Linear(8, 2, device=device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with sonde.watch(model, optimizer, run=folder, stuck_after=1.0) as session:
    for step in range(1000):
        model(torch.randn(4, 8, device=device)).sum().backward()
        if rank == 0 or step < 5:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        else:
            time.sleep(1000)
        optimizer.step()
"""
    start_ranks(code, tmp_path / "run", 2)
    finding = wait_for(tmp_path / "run", "stuck_rank")
    assert (finding.data["missing"], finding.data["waiting"]) == ([1], [0])
    beats = standing_of(tmp_path / "run", time.time()).beats
    assert (beats[0].collective, beats[0].collectives, beats[1].collectives) == ("all_reduce", 11, 10)
    assert (beats[0].phase, beats[1].phase) == ("communication", "other")
    wait_until(lambda: collectives_of(tmp_path / "run", 0), "the dump of torch's flight recorder")
    assert "all_reduce" in collectives_of(tmp_path / "run", 0)[-1]["profiling_name"]
