"""Step phases: where the time of a step goes. The clock is handed in; nothing sleeps."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from tests.waiting import PATIENCE_S
from torch import nn
from torch.utils.data import DataLoader, Dataset, dataloader

import sonde
from sonde.hooks import replace_function
from sonde.hooks.guard import UNGUARDED
from sonde.probes.memory.process import ProcessMemory
from sonde.probes.profile.phases import LoopPhases, PhaseClock, StepVitals
from sonde.testing import FakeClock, MemorySink, tiny_mlp

ORIGINALS = (dataloader._BaseDataLoaderIter.__next__, torch.autograd.backward)


@pytest.fixture(autouse=True)
def _restored():
    yield
    assert (dataloader._BaseDataLoaderIter.__next__, torch.autograd.backward) == ORIGINALS


class Recorder:
    """Keeps numbers by name."""

    def __init__(self):
        self.sites, self.numbers = [], {}

    def site(self, name, quantity, *, part=""):
        self.sites.append(f"{name}:{quantity}{part}" if part else name)
        return len(self.sites) - 1

    def put(self, site, value):
        self.numbers.setdefault(self.sites[site], []).append(value)


class Timed(nn.Module):
    """A model whose forward and backward take a known time."""

    def __init__(self, clock, forward=2.0, backward=3.0):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.clock, self.times = clock, (forward, backward)

    def forward(self, x):
        self.clock.advance(self.times[0])
        out = self.weight * x
        if out.requires_grad:
            out.register_hook(lambda _: self.clock.advance(self.times[1]))
        return out.sum()


class Slow(Dataset):
    def __init__(self, clock, seconds, size=8):
        self.clock, self.seconds, self.size = clock, seconds, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.clock.advance(self.seconds)
        return torch.ones(1)


def test_every_phase_gets_its_own_seconds_and_they_add_up():
    clock = FakeClock()
    model, recorder = Timed(clock), Recorder()
    vitals = StepVitals([model], recorder, UNGUARDED, clock=clock)
    vitals.attach()
    for batch in DataLoader(Slow(clock, 0.5), batch_size=2):
        loss = model(batch)
        clock.advance(0.25)  # the user's own work
        loss.backward()
        vitals.mark("")
        clock.advance(0.125)  # Sonde measures gradients
        vitals.mark("optimizer")
        clock.advance(4.0)
        vitals.mark("")
        clock.advance(0.0625)
        vitals.end_step(True)
    vitals.remove()
    seen = recorder.numbers
    assert seen["(loop):vital.step_time"] == [10.4375] * 3  # the first step began before anybody looked
    assert seen["(loop):vital.data_wait"] == [1.0] * 4
    assert seen["(loop):vital.time_forward"] == [2.0] * 4
    assert seen["(loop):vital.time_backward"] == [3.0] * 4
    assert seen["(loop):vital.time_optimizer"] == [4.0] * 4
    assert seen["(loop):vital.time_watching"] == [0.1875] * 4
    assert seen["(loop):vital.time_other"] == [0.25] * 3
    parts = [seen[key][-1] for key in seen if "time_" in key or "data_wait" in key if "step_time" not in key]
    assert sum(parts) == 10.4375


def test_micro_batches_add_up_and_evaluation_is_distinguished():
    clock = FakeClock()
    model = Timed(clock)
    phases = LoopPhases([model], clock=clock)
    phases.attach()
    phases.end_step()
    for _ in range(3):
        model(torch.ones(1)).backward()
    with torch.no_grad():
        model(torch.ones(1))
    seconds, spent = phases.end_step()
    phases.remove()
    assert seconds == 17.0
    assert spent == {"forward": 6.0, "backward": 9.0, "evaluation": 2.0, "other": 0.0}


def test_without_a_loader_waiting_for_data_is_not_reported():
    clock, recorder = FakeClock(), Recorder()
    model = Timed(clock)
    vitals = StepVitals([model], recorder, UNGUARDED, clock=clock)
    vitals.attach()
    for _ in range(2):
        clock.advance(5.0)  # a generator of the user's own
        model(torch.ones(1)).backward()
        vitals.end_step(True)
    vitals.remove()
    assert "(loop):vital.data_wait" not in recorder.numbers
    assert recorder.numbers["(loop):vital.time_other"] == [5.0]


def test_a_loader_of_the_users_own_can_be_wrapped():
    clock = FakeClock()

    def batches():
        for _ in range(2):
            clock.advance(5.0)
            yield torch.ones(1)

    phases = LoopPhases([], clock=clock)
    phases.end_step()
    found = [phases.end_step()[1]["data_wait"] for _ in phases.loading(batches())]
    assert found == [5.0, 5.0]


def test_a_forward_inside_the_optimizer_is_a_forward():
    clock = FakeClock()
    watch = PhaseClock(clock)
    watch.begin("optimizer")
    clock.advance(1)
    watch.begin("forward")
    clock.advance(2)
    watch.end("forward")
    clock.advance(4)
    watch.end("optimizer")
    assert watch.end_step()[1] == {"other": 0.0, "optimizer": 5.0, "forward": 2.0}


def test_a_forward_inside_a_backward_is_a_checkpoint_recomputed():
    clock = FakeClock()
    watch = PhaseClock(clock)
    watch.begin("backward")
    watch.begin("forward")
    clock.advance(2)
    watch.end("forward")
    clock.advance(1)
    watch.end("backward")
    clock.advance(8)
    assert watch.end_step()[1] == {"other": 8.0, "backward": 3.0}


def test_a_forward_that_raises_does_not_swallow_what_follows():
    clock = FakeClock()
    model = Timed(clock)
    phases = LoopPhases([model], clock=clock)
    phases.attach()
    with pytest.raises(TypeError):
        model("no tensor")
    clock.advance(16)
    _, spent = phases.end_step()
    phases.remove()
    assert spent["other"] == 16.0


def test_another_threads_loader_is_not_what_the_loop_waits_for():
    clock = FakeClock()
    phases = LoopPhases([], clock=clock)
    phases.attach()
    phases.end_step()
    thread = threading.Thread(target=lambda: list(DataLoader(Slow(clock, 1.0))))
    thread.start()
    thread.join(PATIENCE_S)
    _, spent = phases.end_step()
    phases.remove()
    assert spent["data_wait"] == 0.0


def test_nested_listeners_leave_in_any_order():
    first, second = (LoopPhases([], clock=FakeClock()) for _ in range(2))
    first.attach()
    second.attach()
    first.remove()
    assert torch.autograd.backward is not ORIGINALS[1]
    second.remove()
    assert torch.autograd.backward is ORIGINALS[1]


def test_a_wrapper_put_over_ours_stays():
    phases = LoopPhases([], clock=FakeClock())
    phases.attach()
    ours = torch.autograd.backward

    def theirs(*args, **kwargs):
        return ours(*args, **kwargs)

    torch.autograd.backward = theirs
    try:
        phases.remove()
        assert torch.autograd.backward is theirs
        torch.ones(1, requires_grad=True).sum().backward()
        again = LoopPhases([], clock=FakeClock())
        again.attach()
        again.remove()
        assert torch.autograd.backward is theirs
    finally:
        torch.autograd.backward = ours
        again.attach()
        again.remove()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_can_leave_even_if_a_lock_was_held():
    phases = LoopPhases([], clock=FakeClock())
    phases.attach()
    with replace_function._lock.held:
        child = os.fork()
        if not child:
            phases.remove()
            os._exit(7 if torch.autograd.backward is ORIGINALS[1] else 1)
    phases.remove()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_memory_is_sampled_every_tenth_step_or_tenth_of_a_second():
    clock, recorder = FakeClock(), Recorder()
    memory = ProcessMemory(recorder, clock=clock, resident=lambda: 7, available=lambda: None)
    for _ in range(21):
        clock.advance(0.001)
        memory.see()
    assert recorder.numbers == {"process.rss": [7.0] * 3}
    clock.advance(0.125)
    memory.see()
    assert len(recorder.numbers["process.rss"]) == 4


def test_a_session_records_the_phases_of_a_plain_loop(tmp_path):
    model = tiny_mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    data = DataLoader(torch.utils.data.TensorDataset(torch.randn(12, 8)), batch_size=2)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise") as session:
        for (x,) in data:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert session.current_step == 6
    run = sonde.open_run(tmp_path / "run")
    values = {
        name: run.series(f"(loop):vital.{name}", "mean").values
        for name in (
            "step_time",
            "data_wait",
            "time_to_device",
            "time_forward",
            "time_backward",
            "time_optimizer",
            "time_other",
        )
    }
    assert all((each > 0).all() for each in values.values())
    watching = run.series("(loop):vital.time_watching", "mean").values
    parts = sum(values[name][-5:] for name in values if name != "step_time") + watching[-5:]
    assert parts == pytest.approx(values["step_time"], rel=1e-9)
    assert run.series("process.rss:scalar", "mean").values[0] > 1 << 20
    assert run.series("system.available:scalar", "mean").values[0] > 0


def test_a_session_times_a_loader_that_is_wrapped(tmp_path):
    sink = MemorySink()
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise") as session:
        session.subscribe(sink)
        for x in session.loading([torch.ones(2, 8)] * 3):
            model(x).sum().backward()
            optimizer.step()
    assert set(sink.readings("(loop):vital.data_wait")) == {1, 2, 3}


def test_idle_sessions_hand_the_loader_back(tmp_path):
    loader = [1, 2]
    with sonde.watch(tiny_mlp(), run=tmp_path / "run", enabled=False) as session:
        assert session.loading(loader) is loader


def test_nothing_is_wrapped_without_a_diagnosis(tmp_path):
    with sonde.watch(tiny_mlp(), run=tmp_path / "run", diagnose=False):
        assert dataloader._BaseDataLoaderIter.__next__ is ORIGINALS[0]


def test_what_is_done_to_a_batch_before_the_forward_counts_as_bringing_it_to_the_device():
    clock = FakeClock(0.0)
    model = tiny_mlp()
    phases = LoopPhases([model], clock=clock)

    def batches():
        for _ in range(2):
            clock.advance(1.0)
            yield torch.randn(2, 8)

    phases.attach()
    try:
        for x in phases.loading(batches()):
            clock.advance(3.0)  # x = x.to(device)
            model(x)
            clock.advance(5.0)
            _, spent = phases.end_step()
            assert spent["data_wait"] == 1.0
            assert spent["to_device"] == 3.0
            assert spent["other"] == 5.0
        clock.advance(7.0)  # after the last batch nothing is brought anywhere
        assert phases.end_step()[1] == {"data_wait": 0.0, "other": 7.0}
    finally:
        phases.remove()
