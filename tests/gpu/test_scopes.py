"""Profiler scope, memory scope and step phases on a CUDA device."""

from __future__ import annotations

import inspect
import pickle

import pytest
import torch
from torch import nn

from sonde.probes import memory_scope, memory_snapshot, profile_scope
from sonde.probes.profile.module_times import ModuleTimes

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]

WIDTH = 512


class Layers(nn.Module):
    def __init__(self, count=6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.asking = False

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
            if self.asking and x.mean().item() > 1e6:  # ASKS
                x = x / 2
        return x


def line_of(function, mark):
    source, first = inspect.getsourcelines(function)
    return next(first + index for index, line in enumerate(source) if line.rstrip().endswith(mark))


def train(model, steps):
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(steps):
        loss = model(torch.ones(256, WIDTH, device="cuda")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_operators_and_modules_have_times_of_the_device():
    model = Layers().cuda()
    train(model, 2)
    with profile_scope(schedule={"wait": 1, "active": 3}) as scope:
        train(model, 6)
    table = {row.name: row for row in scope.operators()}
    assert table["aten::addmm"].calls == 18
    assert table["aten::addmm"].self_cuda_ms > 0
    assert table["aten::linear"].cuda_ms >= table["aten::addmm"].self_cuda_ms * 0.99
    assert sum(row.share for row in scope.operators()) == pytest.approx(1)
    modules = {row.name: row for row in scope.modules()}
    assert modules["layers.3"].cuda_forward_ms > 0
    assert modules["layers.3"].cuda_backward_ms > 0
    assert modules["Layers"].cuda_forward_ms >= modules["layers.3"].cuda_forward_ms
    assert scope.utilisation().share > 0


def test_an_item_per_layer_waits_and_is_named_with_its_line():
    model = Layers().cuda()
    model.asking = True
    with profile_scope(schedule={"wait": 1, "active": 3}) as scope:
        train(model, 6)
    sync = next(each for each in scope.syncs() if each.what == ".item()")
    assert (sync.calls, sync.waits) == (18, True)
    assert sync.where.endswith(f"test_scopes.py:{line_of(Layers.forward, '# ASKS')}")
    verdict = next(each for each in scope.verdict() if each.kind == "host_sync")
    assert "called 6 times a step" in verdict.text


def test_a_copy_to_the_host_is_named_with_its_line():
    with profile_scope() as scope:
        x = torch.ones(1000, device="cuda") * 2
        x.cpu()  # COPIES
    found = [each for each in scope.syncs() if each.what == ".cpu()"]
    line = line_of(test_a_copy_to_the_host_is_named_with_its_line, "# COPIES")
    assert [each.where.rpartition(":")[2] for each in found] == [str(line)]


def test_copies_to_the_device_are_reported():
    x = torch.ones(64 << 20)
    x.cuda()
    with profile_scope(stacks=False, memory=False) as scope:
        x.cuda()
    (copies,) = [row for row in scope.copies() if row.what.startswith("HtoD (Pageable")]
    assert copies.calls == 1
    assert copies.ms > 1


def test_timing_modules_never_waits(no_waiting):
    model = Layers().cuda()
    train(model, 2)
    times = ModuleTimes()
    times.attach()
    try:
        with no_waiting():
            train(model, 5)
    finally:
        times.remove()
    torch.cuda.synchronize()
    assert all(row.cuda_forward_ms for row in times.table())


def test_timing_modules_leaves_a_graph_capture_alone():
    model = Layers().cuda()
    x = torch.ones(256, WIDTH, device="cuda")
    times = ModuleTimes()
    times.attach()
    try:
        for _ in range(3):
            model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"), torch.no_grad():
            output = model(x)
        graph.replay()
        model(x)
    finally:
        times.remove()
    torch.cuda.synchronize()
    assert torch.allclose(output, model(x))
    rows = {row.name: row for row in times.table()}
    assert rows["layers.3"].calls == 5
    assert rows["layers.3"].cuda_forward_ms > 0


def test_the_first_call_of_a_module_has_a_time_of_the_device():
    model = Layers().cuda()
    times = ModuleTimes()
    times.attach()
    model(torch.ones(256, WIDTH, device="cuda"))
    times.remove()
    torch.cuda.synchronize()
    assert all(row.cuda_forward_ms > 0 for row in times.table())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_modules_of_two_devices_are_timed_each_on_its_own():
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.here, self.there = nn.Linear(WIDTH, WIDTH).to("cuda:0"), nn.Linear(WIDTH, WIDTH).to("cuda:1")

        def forward(self, x):
            return self.there(self.here(x).to("cuda:1"))

    model = Split()
    times = ModuleTimes()
    times.attach()
    for _ in range(5):
        model(torch.ones(256, WIDTH, device="cuda:0")).sum().backward()
        times.end_backward()
    times.remove()
    for index in range(2):
        torch.cuda.synchronize(index)
    rows = {row.name: row for row in times.table()}
    assert all(row.cuda_forward_ms > 0 and row.cuda_backward_ms > 0 for row in rows.values())


def test_step_phases_and_memory_never_wait(watched, no_waiting):
    model = Layers().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.ones(64, WIDTH, device="cuda")
    with watched(model, optimizer) as seen:
        model(x).sum().backward()
        optimizer.step()
        with no_waiting(), memory_scope():
            for _ in range(5):
                model(x).sum().backward()
                optimizer.step()
    assert set(seen["(loop):vital.time_forward"]) == {1, 2, 3, 4, 5, 6}
    assert seen["process.rss:scalar"][1].mean > 0


def test_a_leak_on_the_device_is_found_with_its_line():
    model = Layers(2).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    kept = []
    with memory_scope(max_share=100.0) as scope:
        for _ in range(60):
            loss = model(torch.ones(64, WIDTH, device="cuda")).square().mean()
            loss.backward()
            optimizer.step()
            kept.append(model(torch.ones(64, WIDTH, device="cuda")).square().mean())  # LEAKS
    leak = next(each for each in scope.leaks() if each.place == "cuda:0")
    assert leak.lines[0].line == line_of(test_a_leak_on_the_device_is_found_with_its_line, "# LEAKS")
    assert leak.growth.per_step > 100e3


def test_running_out_of_memory_leaves_a_history(tmp_path):
    file = tmp_path / "memory.pickle"
    with pytest.raises(torch.OutOfMemoryError), memory_scope(history=file) as scope:
        x = torch.ones(1000, device="cuda")
        scope.dump_history(tmp_path / "asked.pickle")
        torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
    del x
    for each in (file, tmp_path / "asked.pickle"):
        assert pickle.loads(each.read_bytes())["segments"]


def test_a_snapshot_has_the_devices_numbers():
    x = torch.ones(1 << 20, device="cuda")
    snapshot = memory_snapshot()
    assert snapshot["cuda_allocated"] >= x.nbytes
    assert snapshot["cuda_max_reserved"] >= snapshot["cuda_reserved"] >= snapshot["cuda_allocated"]
    assert snapshot["cuda_device_count"] >= 1
