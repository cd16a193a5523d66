"""Times on CUDA devices: whose events are whose, and what happens while graphs are captured. Shown with fake events."""

from __future__ import annotations

import pytest
import torch
from tests.probes.fake_cuda import FakeCuda
from torch import nn

from sonde.probes.profile import cuda_timing, module_times
from sonde.probes.profile.cuda_timing import CudaTiming, EventPool
from sonde.probes.profile.module_times import ModuleTimes
from sonde.testing import FakeClock

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def cuda(monkeypatch, clock):
    fake = FakeCuda(clock)
    fake.install(monkeypatch)
    return fake


class Placed(nn.Module):
    """Takes a known time and says that its output lies on a device."""

    def __init__(self, clock, device, seconds):
        super().__init__()
        self.clock, self.device, self.seconds = clock, device, seconds

    def forward(self, x):
        self.clock.advance(self.seconds)
        x = x * 1.0
        x.place = self.device
        return x


@pytest.fixture
def pipeline(monkeypatch, clock):
    """A model whose layers lie on two devices."""
    monkeypatch.setattr(
        module_times,
        "_cuda_device",
        lambda tensors: next((each.place for each in tensors if hasattr(each, "place")), None),
    )
    return nn.Sequential(Placed(clock, FIRST, 1.0), Placed(clock, SECOND, 2.0))


def timed(model, clock, passes, between=lambda: None):
    times = ModuleTimes(clock=clock)
    times.attach()
    for _ in range(passes):
        model(torch.ones(2, requires_grad=True)).sum().backward()
        times.end_backward()
        between()
    times.remove()
    return times


def test_modules_of_two_devices_take_events_of_their_own(cuda, pipeline, clock):
    rows = {row.name: row for row in timed(pipeline, clock, 3).table()}
    # The first call tells where the first layer is; what a layer is given tells it of the others.
    assert rows["0"].cuda_forward_ms == 2 * 1000.0
    assert rows["1"].cuda_forward_ms == 2 * 2000.0 + 2000.0
    assert {event.index for event in cuda.events} == {0, 1}


def test_events_are_used_again(cuda, pipeline, clock):
    timed(pipeline, clock, 3)
    few = len(cuda.events)
    timed(pipeline, clock, 60)
    assert len(cuda.events) <= 2 * few


def test_a_device_that_lags_does_not_hold_back_another(cuda, pipeline, clock):
    cuda.lagging.add(0)
    times = timed(pipeline, clock, 3)
    rows = {row.name: row for row in times.table()}
    assert rows["0"].cuda_forward_ms is None
    assert rows["1"].cuda_forward_ms > 0
    cuda.lagging.clear()
    assert {row.name: row for row in times.table()}["0"].cuda_forward_ms == 2000.0


def test_what_has_not_arrived_is_bounded(cuda, pipeline, clock, monkeypatch):
    monkeypatch.setattr(module_times, "_MOST_PENDING", 5)
    cuda.lagging.update((0, 1))
    times = timed(pipeline, clock, 50)
    assert [len(each.pending) for each in times._devices.values()] == [5, 5]


def test_while_a_graph_is_captured_modules_put_no_event_anywhere_and_ask_about_none(cuda, pipeline, clock):
    times = ModuleTimes(clock=clock)
    times.attach()
    for capturing in (False, False, True, True, False):
        cuda.capturing = {0, 1} if capturing else set()
        made = len(cuda.events)
        pipeline(torch.ones(2))
        assert len(cuda.events) == made or not capturing
    times.remove()
    rows = {row.name: row for row in times.table()}
    assert (rows["0"].calls, rows["0"].forward_ms) == (5, 5000.0)
    assert rows["0"].cuda_forward_ms == 2 * 1000.0, "neither of the first pass nor of the captured ones"


def test_a_capture_on_another_device_than_the_current_is_noticed(cuda):
    cuda.capturing = {1}
    assert EventPool(SECOND).record() is None
    assert EventPool(FIRST).record() is not None


class Late:
    """A recorder that keeps what comes late."""

    def __init__(self):
        self.sites, self.late = [], []

    def site(self, name, quantity):
        self.sites.append(name)
        return len(self.sites) - 1

    def put_late(self, numbers):
        self.late.append(numbers)

    def read(self):
        return [{self.sites[site]: value for site, value in numbers()} for numbers in self.late]


def step(timing, clock):
    for phase, seconds in (("forward", 1.0), ("backward", 2.0), ("", 0.5), ("optimizer", 4.0)):
        timing.mark(phase)
        clock.advance(seconds)
    timing.end_step()


def test_phases_on_the_device_belong_to_their_step(cuda, clock):
    recorder = Late()
    timing = CudaTiming(SECOND, recorder)
    for _ in range(2):
        step(timing, clock)
    phases = {"cuda:1.forward_ms": 1000.0, "cuda:1.backward_ms": 2000.0, "cuda:1.optimizer_ms": 4000.0}
    assert recorder.read() == [phases, phases | {"cuda:1.step_ms": 7500.0}]


def test_a_step_that_ends_while_a_graph_is_captured_is_not_timed(cuda, clock):
    recorder = Late()
    timing = CudaTiming(FIRST, recorder)
    step(timing, clock)
    cuda.capturing = {0}
    step(timing, clock)
    cuda.capturing = set()
    step(timing, clock)
    first, second = recorder.read()
    assert first == second, "from the captured step to the next nothing is timed"


def test_passes_without_a_step_do_not_fill_the_memory(cuda, clock, monkeypatch):
    monkeypatch.setattr(cuda_timing, "_MOST_MARKS", 10)
    recorder = Late()
    timing = CudaTiming(FIRST, recorder)
    for _ in range(40):
        timing.mark("forward")
    assert len(cuda.events) == 10
    timing.end_step()
    assert not recorder.late, "what was not seen to its end has no time"
    step(timing, clock)
    assert "cuda:0.forward_ms" in recorder.read()[0]
