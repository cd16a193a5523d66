"""The profiler scope, as somebody with a slow loop would use it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sonde.errors import OptionError
from sonde.probes import ProfileSchedule, profile_scope
from sonde.probes.profile.scope import ANNOTATION


class Layers(nn.Module):
    """A few layers; with `asking`, each reads a number back."""

    def __init__(self, count=4, width=16, *, asking=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.asking = asking

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
            if self.asking and x.mean().item() > 1e6:  # the planted fault
                x = x / 2
        return x


ASKING_LINE = 1 + next(
    number
    for number, line in enumerate(Path(__file__).read_text().splitlines())
    if line.endswith("# the planted fault")
)


def train(model, steps, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        loss = F.mse_loss(model(torch.ones(4, 16)), torch.zeros(4, 16))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def read(path):
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        return json.load(file)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_the_trace_opens_and_has_our_phases_in_it(tmp_path, name):
    with profile_scope(tmp_path / "deep" / name) as scope:
        train(Layers(), 3)
    assert scope.trace_files == [tmp_path / "deep" / name]
    events = read(scope.trace_files[0])["traceEvents"]
    complete = [event for event in events if event.get("ph") == "X"]
    assert all(event["dur"] >= 0 and event["ts"] > 0 and event["name"] for event in complete)
    assert {"aten::addmm", "aten::mse_loss"} <= {event["name"] for event in complete}
    phases = [event["name"] for event in complete if event["name"].startswith(ANNOTATION)]
    assert phases == [f"{ANNOTATION}{phase}" for phase in ("forward", "backward", "optimizer")] * 3


def test_a_schedule_bounds_what_is_recorded(tmp_path):
    plan = ProfileSchedule(wait=2, warmup=1, active=2, repeat=2)
    with profile_scope(tmp_path / "trace.json", schedule=plan) as scope:
        train(Layers(), 40)
    assert scope.steps == 40
    assert [path.name for path in scope.trace_files] == ["trace.json", "trace.2.json"]
    for path in scope.trace_files:
        names = [event["name"] for event in read(path)["traceEvents"]]
        assert names.count(f"{ANNOTATION}optimizer") == 2
    table = {row.name: row.calls for row in scope.operators()}
    assert table["aten::addmm"] == 4 * 4  # four layers in four recorded steps


def test_without_a_schedule_recording_stops_by_itself_and_says_so():
    with profile_scope(stacks=False, memory=False) as scope:
        train(Layers(1), 25)
    assert {row.name: row.calls for row in scope.operators()}["aten::addmm"] == 20
    assert "stopped after 20 steps" in scope.notes[0]


def test_a_schedule_that_never_became_active_says_so():
    with profile_scope(schedule={"wait": 5}) as scope:
        train(Layers(1), 2)
    assert "records from step 7 on" in scope.notes[0]
    assert scope.operators() == scope.syncs() == []


def test_nested_use_is_refused_with_the_cure_and_the_outer_one_goes_on():
    with profile_scope() as outer:
        with pytest.raises(OptionError, match="only one at a time"), profile_scope():
            pass
        train(Layers(1), 2)
    assert outer.operators()


def test_an_exception_passes_through_and_leaves_nothing_running(tmp_path):
    with pytest.raises(ZeroDivisionError), profile_scope(tmp_path / "trace.json") as scope:
        train(Layers(1), 2)
        raise ZeroDivisionError
    assert not torch._C._autograd._profiler_enabled()
    assert read(scope.trace_files[0])["traceEvents"]
    with profile_scope():
        pass


def test_an_unknown_word_in_a_schedule_is_refused():
    with pytest.raises(OptionError, match="actve"):
        profile_scope(schedule={"actve": 3})
    with pytest.raises(OptionError, match="active takes"):
        profile_scope(schedule={"active": 0})


def test_a_scope_serves_once():
    with profile_scope(stacks=False) as scope:
        pass
    with pytest.raises(OptionError, match="used already"), scope:
        pass


def test_steps_can_be_ended_by_hand():
    with profile_scope(schedule={"wait": 0, "warmup": 0, "active": 2}) as scope:
        for _ in range(5):
            Layers(1)(torch.ones(4, 16)).sum().backward()
            scope.step()
    assert scope.steps == 5
    assert {row.name: row.calls for row in scope.operators()}["aten::addmm"] == 2


def test_an_item_per_layer_is_named_with_its_line():
    model = Layers(8, asking=True)
    with profile_scope(schedule={"wait": 1, "active": 3}) as scope:
        train(model, 6)
    sync = scope.syncs()[0]
    assert (sync.what, sync.calls) == (".item()", 24)
    assert sync.where.endswith(f"test_profiling.py:{ASKING_LINE}")
    verdict = next(each for each in scope.verdict() if each.kind == "host_sync")
    assert ".item() called 8 times a step at" in verdict.text
    assert f"test_profiling.py:{ASKING_LINE}" in verdict.text


def test_a_fault_of_the_scope_does_not_reach_training(caplog):
    times = iter(range(100))

    def broken():
        now = next(times)
        if now > 30:
            raise RuntimeError("a fault of ours")
        return float(now)

    model = Layers(2)
    with profile_scope(stacks=False, clock=broken):
        train(model, 8)
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert "a fault of ours" in caplog.text
    assert not torch._C._autograd._profiler_enabled()
