"""Snapshots of memory and the memory scope."""

from __future__ import annotations

import contextlib
import itertools
import json

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from sonde.errors import OptionError
from sonde.probes import compare_snapshots, memory_scope, memory_snapshot
from sonde.probes.memory.device import DeviceMemory
from sonde.probes.memory.leaks import count_live


def test_a_snapshot_has_the_keys_users_know_and_is_plain_json():
    snapshot = memory_snapshot(clock=lambda: 7.0)
    assert snapshot["timestamp"] == 7.0
    assert {"cpu_memory_percent", "cpu_memory_available", "cpu_memory_used", "rss"} <= set(snapshot)
    assert json.loads(json.dumps(snapshot)) == snapshot
    if not torch.cuda.is_initialized():
        assert not any(name.startswith("cuda") for name in snapshot)


def test_a_snapshot_agrees_with_psutil():
    psutil = pytest.importorskip("psutil")
    snapshot, told = memory_snapshot(), psutil.Process().memory_info().rss
    assert abs(snapshot["rss"] - told) < 16 << 20


@pytest.fixture
def books(monkeypatch):
    """One CUDA device, whose allocator answers with what is handed over, or raises it."""

    def install(answer):
        def ask(device):
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", ask)

    return install


class Numbers:
    """A recorder of plain numbers."""

    def __init__(self):
        self.sites, self.numbers = [], {}

    def site(self, name, quantity):
        self.sites.append(name)
        return len(self.sites) - 1

    def put(self, site, value):
        self.numbers[self.sites[site]] = value


def test_an_allocator_that_counts_nothing_is_not_reported(books):
    books(RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats."))
    recorder = Numbers()
    DeviceMemory(torch.device("cuda", 0), recorder).see()
    assert not recorder.numbers
    found = {name: value for name, value in memory_snapshot().items() if name.startswith("cuda")}
    assert found == {"cuda_device_count": 1, "cuda_current_device": 0}
    with memory_scope() as scope:
        pass
    assert not scope.leaks()


def test_numbers_of_the_allocator_are_found_where_torch_keeps_them(books):
    books(
        {
            "allocated_bytes": {"all": {"current": 3, "peak": 5}},
            "reserved_bytes": {"all": {"current": 7, "peak": 11}},
            "num_alloc_retries": 2,
        }
    )
    recorder = Numbers()
    DeviceMemory(torch.device("cuda", 0), recorder).see()
    assert recorder.numbers == {
        "cuda:0.allocated": 3,
        "cuda:0.allocated_peak": 5,
        "cuda:0.reserved": 7,
        "cuda:0.allocation_retries": 2,
    }
    snapshot = memory_snapshot()
    assert [snapshot[f"cuda_{name}"] for name in ("allocated", "max_allocated", "reserved", "max_reserved")] == [
        3,
        5,
        7,
        11,
    ]


def test_comparing_leaves_out_what_only_one_has():
    change = compare_snapshots({"timestamp": 1.0, "rss": 10, "pss": 3}, {"timestamp": 3.0, "rss": 25})
    assert change == {"timestamp": 2.0, "rss": 15}


def test_a_scope_sees_what_was_allocated_inside_it():
    kept = []
    with memory_scope() as scope:
        kept.append(torch.ones(16 << 20))  # 64 MiB, touched; what else comes and goes meanwhile is less
    assert 48 << 20 < scope.change()["rss"] < 128 << 20


def test_a_scope_serves_once():
    with memory_scope() as scope:
        pass
    with pytest.raises(OptionError, match="used already"), scope:
        pass


def test_a_scope_lets_exceptions_through():
    with pytest.raises(ZeroDivisionError), memory_scope() as scope:
        raise ZeroDivisionError
    assert scope.after


def test_growth_is_reported_by_phase():
    held = 1000

    class Growing(nn.Linear):
        def forward(self, x):
            nonlocal held
            held += 10
            return super().forward(x)

    model = Growing(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with memory_scope(resident=lambda: held) as scope:
        for _ in range(50):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert scope.phases()["forward"]["process"] == 500
    assert scope.phases()["backward"]["process"] == scope.phases()["optimizer"]["process"] == 0
    found = scope.growth()["process"]
    assert found.steady
    assert found.per_step == found.low == found.high == 10


def test_a_long_run_is_judged_from_a_bounded_number_of_even_samples():
    held = iter(range(0, 10**9, 100))
    with memory_scope(resident=lambda: next(held), max_share=0.0) as scope:
        for _ in range(9000):
            scope.step()
    steps = [step for step, _ in scope._samples["process"]]
    assert 500 < len(steps) < 2000
    assert len({after - before for before, after in itertools.pairwise(steps)}) == 1
    assert scope.growth()["process"].steady


def test_watching_memory_changes_no_number():
    def weights(watched):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(model.parameters())
        with memory_scope(max_share=100.0) if watched else contextlib.nullcontext():
            for _ in range(6):
                model(torch.randn(4, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()], torch.get_rng_state()

    (bare, state), (watched, after) = weights(False), weights(True)
    assert all(torch.equal(a, b) for a, b in zip(bare, watched, strict=True))
    assert torch.equal(state, after)


def test_every_must_be_a_number_of_steps():
    with pytest.raises(OptionError, match="every"):
        memory_scope(every=0)


def test_tensors_that_stand_for_others_while_torch_compiles_are_not_counted():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    stand_in, real = mode.from_tensor(torch.ones(7, 3)), torch.ones(5, 11)
    assert any(type(size) is not int for size in stand_in.shape)
    shapes = {kind.shape for kind in count_live().counts}
    assert real.shape in shapes
    assert all(type(size) is int for shape in shapes for size in shape)
    with memory_scope() as scope:
        pass
    assert scope.leaks() == []
