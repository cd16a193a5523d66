"""What a profile answers: phases, modules, operators, verdicts, flame graphs. Numbers against slow oracles."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import sonde
from sonde.hooks.replace_function import BACKWARD
from sonde.probes import profile_scope
from sonde.probes.profile.advice import (
    HostSync,
    TorchPattern,
    judge_copies,
    judge_patterns,
    judge_phases,
    judge_syncs,
    torch_patterns,
    utilisation,
)
from sonde.probes.profile.calls import copy_table, module_weights
from sonde.probes.profile.module_times import ModuleTimes
from sonde.probes.profile.trace_file import folded_lines, speedscope
from sonde.testing import FakeClock, tiny_mlp

PLAIN = {"shapes": True, "stacks": False, "memory": False, "modules": False}


class Slow(Dataset):
    """A dataset whose samples take a second on a clock of ours, or real time in matrix products."""

    def __init__(self, clock):
        self.clock = clock

    def __len__(self):
        return 12

    def __getitem__(self, index):
        self.clock.advance(1.0)
        return torch.ones(8)


def train(model, optimizer, loader, clock):
    for x in loader:
        clock.advance(0.5)
        model(x).sum().backward()
        clock.advance(0.5)
        optimizer.step()
        optimizer.zero_grad()


def test_a_slow_loader_is_found_with_its_share_and_its_cause():
    clock, model = FakeClock(), tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with profile_scope(clock=clock, **PLAIN) as scope:
        train(model, optimizer, DataLoader(Slow(clock), batch_size=3), clock)
    assert scope.phases()["data_wait"] == 0.75  # three of four seconds
    assert scope.step_ms == 4000
    (verdict,) = scope.verdict()
    assert verdict.text.startswith("75% of the step waits for data: num_workers is 0")
    assert verdict.evidence == {"share": 0.75, "step_ms": 4000, "data_wait_ms": 3000, "num_workers": 0}


def test_a_healthy_program_gets_no_verdict():
    clock = FakeClock()

    class Busy(nn.Linear):
        def forward(self, x):
            clock.advance(20)
            out = super().forward(x)
            out.register_hook(lambda _: clock.advance(40))
            return out

    model = Busy(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    with profile_scope(schedule={"wait": 1, "active": 2}, clock=clock) as scope:
        for x in DataLoader(Slow(clock), batch_size=3):
            loss = F.mse_loss(model(x), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())  # one number a step for the log is fine
    assert scope.phases()["data_wait"] == pytest.approx(3 / 63)
    assert scope.verdict() == []


def test_phases_are_judged_by_their_shares():
    assert judge_phases({"forward": 0.5, "backward": 0.4, "data_wait": 0.05}, step_ms=10, workers=0) == []
    (verdict,) = judge_phases({"optimizer": 0.45}, step_ms=10, workers=None, optimizer={"foreach": False})
    assert "takes 45% of the step" in verdict.text
    assert "foreach=True or fused=True" in verdict.text
    (verdict,) = judge_phases({"data_wait": 0.3}, step_ms=10, workers=2)
    assert "2 worker(s)" in verdict.text
    (verdict,) = judge_phases({"other": 0.7}, step_ms=10, workers=None)
    assert "session.loading" in verdict.text


def test_waits_are_judged_by_how_often_or_how_long():
    def sync(calls, ms, waits):
        return HostSync(what=".item()", where="a.py:3", function="f", calls=calls, ms=ms, waits=waits)

    def judged(*syncs):
        return judge_syncs(syncs, steps=10, step_ms=10)

    assert judged(sync(10, 90, False)) == []  # on the CPU the time is the computing itself
    assert judged(sync(10, 4, True)) == []
    assert judged(sync(40, 0, False))[0].evidence["calls_per_step"] == 4
    assert "in 50% of the step" in judged(sync(10, 50, True))[0].text


def test_copies_from_memory_that_is_not_pinned_are_named_if_they_take_long():
    copies = copy_table([("HtoD (Pageable -> Device)", 20_000_000), ("HtoD (Pinned -> Device)", 90_000_000)])
    assert [row.calls for row in copies] == [1, 1]
    (verdict,) = judge_copies(copies, steps=10, step_ms=10)
    assert "takes 20% of the step" in verdict.text
    assert "pin_memory=True" in verdict.text
    assert judge_copies(copies, steps=10, step_ms=100) == []


def test_modules_are_timed_forward_and_backward():
    clock = FakeClock()

    class Timed(nn.Module):
        def __init__(self, forward, backward):
            super().__init__()
            self.seconds = forward, backward

        def forward(self, x):
            clock.advance(self.seconds[0])
            x = x * 1.0
            x.register_hook(lambda _: clock.advance(self.seconds[1]))  # runs when its own backward does
            return x + 0

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Timed(1, 2), Timed(4, 8)

        def forward(self, x):
            clock.advance(0.5)
            return self.second(self.first(x))

    times, model = ModuleTimes(clock=clock), Pair()
    times.attach()
    after = BACKWARD.listen(end=times.end_backward)
    for _ in range(3):
        model(torch.ones(2, requires_grad=True)).sum().backward()
        clock.advance(100)
    times.remove()
    after.remove()
    rows = {row.name: row for row in times.table()}
    assert list(rows) == ["Pair", "second", "first"]
    found = {name: (row.calls, row.forward_ms, row.self_forward_ms, row.backward_ms) for name, row in rows.items()}
    assert found == {
        "Pair": (3, 16500, 1500, 30000),
        "first": (3, 3000, 3000, 6000),
        "second": (3, 12000, 12000, 24000),
    }


def test_a_module_that_raises_leaves_the_others_right():
    times, model = ModuleTimes(clock=FakeClock()), tiny_mlp()
    times.attach()
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 3))
    model(torch.ones(2, 8))
    times.remove()
    assert {row.name: row.calls for row in times.table()} == {"Sequential": 2, "0": 2, "1": 1, "2": 1}


def test_the_operator_table_agrees_with_torchs_own():
    model = tiny_mlp()
    with profile_scope(**PLAIN) as scope:
        model(torch.ones(4, 8)).sum().backward()
    theirs = {row.key: row for row in scope._windows.recordings[0].key_averages()}
    ours = {row.name: row for row in scope.operators()}
    for name in ("aten::addmm", "aten::linear", "aten::mm", "aten::clamp_min", "aten::sum"):
        assert ours[name].calls == theirs[name].count
        assert ours[name].cpu_ms == pytest.approx(theirs[name].cpu_time_total / 1e3, rel=1e-3)
        assert ours[name].self_cpu_ms == pytest.approx(theirs[name].self_cpu_time_total / 1e3, rel=1e-3)
        assert (ours[name].flops or 0) == theirs[name].flops
    assert ours["aten::addmm"].flops == 2 * 4 * (8 * 16 + 16 * 4)
    assert sum(row.share for row in scope.operators()) == pytest.approx(1)
    shapes = [row.shapes for row in scope.operators(by_shape=True) if row.name == "aten::addmm"]
    assert sorted(shape[1] for shape in shapes) == [(4, 8), (4, 16)]


def test_memory_of_operators_is_what_they_allocate():
    with profile_scope(modules=False) as scope:
        kept = torch.zeros(1000, 100) + 1
    table = {row.name: row.self_bytes for row in scope.operators()}
    assert table["aten::add"] == pytest.approx(kept.nbytes, abs=64)  # less the 1, a tensor it frees


def test_utilisation_is_flops_over_time_over_a_measured_peak():
    a = torch.ones(64, 64)
    with profile_scope(**PLAIN) as scope:
        a @ a
    tree = scope._trees[0]
    found = utilisation(scope._trees, peak=lambda on_cuda: 1e9)
    begin = min(call.start_ns for call in tree.calls)
    end = max(call.start_ns + call.duration_ns for call in tree.calls)
    assert found.share == pytest.approx(2 * 64**3 / (end - begin))
    assert utilisation([]) is None
    assert scope.utilisation().peak_flops_per_second > 1e6


def test_flame_graphs_have_the_programs_own_lines_and_a_valid_form(tmp_path):
    model = tiny_mlp()
    with profile_scope() as scope:
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()
    lines = scope.folded(tmp_path / "stacks.folded")
    assert (tmp_path / "stacks.folded").read_text().splitlines() == lines
    stack, _, weight = next(line for line in lines if line.split()[-2].endswith("aten::addmm")).rpartition(" ")
    assert int(weight) > 0
    assert "test_profile_answers.py" in stack
    check_speedscope(scope.speedscope(tmp_path / "deep" / "profile.json"))
    assert json.loads((tmp_path / "deep" / "profile.json").read_text()) == scope.speedscope()


def test_without_stacks_modules_stand_in():
    with profile_scope(stacks=False) as scope:
        tiny_mlp()(torch.ones(4, 8)).sum().backward()
    assert any(line.startswith("forward;") for line in scope.folded())
    assert module_weights([]) == {}


def check_speedscope(content):
    """What speedscope's schema asks of a sampled profile."""
    assert content["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    frames = content["shared"]["frames"]
    assert all(set(frame) <= {"name", "file", "line", "col"} and frame["name"] for frame in frames)
    for profile in content["profiles"]:
        assert profile["type"] == "sampled"
        assert profile["unit"] in {"none", "nanoseconds", "microseconds", "milliseconds", "seconds", "bytes"}
        assert len(profile["samples"]) == len(profile["weights"])
        assert all(0 <= index < len(frames) for stack in profile["samples"] for index in stack)
        assert profile["endValue"] - profile["startValue"] == pytest.approx(sum(profile["weights"]))


def test_folded_lines_and_speedscope_of_known_stacks():
    weights = {("a", "b;c"): 2.0, ("a",): 3.4, ("z",): 0.2}
    assert folded_lines(weights) == ["a 3", "a;b,c 2"]
    content = speedscope(weights, name="known")
    check_speedscope(content)
    names = [frame["name"] for frame in content["shared"]["frames"]]
    stacks = {tuple(names[index] for index in stack) for stack in content["profiles"][0]["samples"]}
    assert stacks == set(weights)


def test_torchs_patterns_are_passed_on_and_their_failing_is_theirs():
    model = tiny_mlp()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    with profile_scope() as scope:
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert isinstance(scope.patterns(), list)
    assert torch_patterns(object()) == []
    pattern = TorchPattern(name="P", description="is slow", matches=3, where="a.py:1", url="")
    assert "is slow (3 times, first at a.py:1)" in judge_patterns([pattern])[0].text
    assert judge_patterns([pattern], quiet=["P"]) == []


def test_a_profile_is_noted_in_the_session_and_lies_in_its_run(tmp_path):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise") as session,
        profile_scope(schedule={"wait": 0, "active": 1}, session=session, stacks=False) as scope,
    ):
        for _ in range(4):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
    assert scope.trace_files == [tmp_path / "run" / "traces" / "profile.json.gz"]
    event = next(event for event in sonde.open_run(tmp_path / "run").events if event.event_type == "profile")
    assert event.message == "profiled 1 of 4 steps"


def test_profiling_changes_no_number():
    def weights(profiled):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(model.parameters())
        scope = profile_scope(schedule={"wait": 1, "active": 2}) if profiled else None
        if scope is not None:
            scope.__enter__()
        for _ in range(5):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if scope is not None:
            scope.__exit__(None, None, None)
        return [parameter.detach().clone() for parameter in model.parameters()], torch.get_rng_state()

    (bare, state), (watched, after) = weights(False), weights(True)
    assert all(torch.equal(a, b) for a, b in zip(bare, watched, strict=True))
    assert torch.equal(state, after)
