"""Non-finite values on a GPU: nothing waits while all is well, and the guard and the origin work all the same."""

from __future__ import annotations

import contextlib
import copy
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sonde
from sonde.errors import NonFiniteError
from sonde.testing import MemorySink

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        h = self.fc(x).sigmoid() * (x[:, :1] > 0)
        return self.head(torch.log(h))  # BAD


LINE = next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith("# BAD"))


def new(**options):
    torch.manual_seed(0)
    model = Net().cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, **options)


def batches(bad, count=12):
    generator = torch.Generator().manual_seed(1)
    made = [torch.rand(4, 3, generator=generator) + 0.1 for _ in range(count)]
    for index in bad:
        made[index][2] = -1.0
    return [x.cuda() for x in made]


def train(model, optimizer, data):
    target = torch.ones(4, 1, device="cuda")
    for x in data:
        optimizer.zero_grad()
        F.mse_loss(model(x), target).backward()
        optimizer.step()


def watched(path, model, optimizer, data, **options):
    sink = MemorySink()
    with sonde.watch(model, optimizer, run=path, on_error="raise", **options) as session:
        session.subscribe(sink)
        train(model, optimizer, data)
    return sink


def origins(sink):
    return [finding for finding in sink.findings if "origin" in finding.data and not finding.withdrawn]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize(
    ("guard", "kind"),
    [*((guard, "fused") for guard in (None, "skip", "stop", "stop_late")), (None, "foreach"), ("stop_late", "foreach")],
)
def test_a_healthy_training_waits_for_nothing(guard, kind, tmp_path, no_waiting):
    model, optimizer = new(**{kind: True})
    data = batches([])
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise", guard=guard):
        train(model, optimizer, data[:2])
        with no_waiting():
            train(model, optimizer, data[2:])


def test_a_fused_optimizer_skips_by_itself(tmp_path):
    model, optimizer = new(fused=True)
    sink = watched(tmp_path / "run", model, optimizer, batches([3]), guard="skip")
    bare, bare_optimizer = new(fused=True)
    train(bare, bare_optimizer, [x for index, x in enumerate(batches([])) if index != 3])
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), bare.parameters(), strict=True))
    assert [block.step for block in sink.blocks if block.skipped] == [4]
    assert not hasattr(optimizer, "found_inf")
    # The batch is gone when the readings arrive: they name the module.
    assert [finding.kind for finding in origins(sink)][:1] == ["nan_forward"]


def test_with_a_guard_the_operation_is_named_when_it_comes_again(tmp_path):
    model, optimizer = new(fused=True)
    sink = watched(tmp_path / "run", model, optimizer, batches(range(3, 12)), guard="skip")
    found = origins(sink)[0].data["origin"]
    assert (found["op"], found["line"]["line"], found["samples"]) == ("aten.log.default", LINE, [2])


def test_a_plain_optimizer_is_held_back_and_the_operation_named_at_once(tmp_path):
    model, optimizer = new(foreach=True)
    sink = watched(tmp_path / "run", model, optimizer, batches([3]), guard="skip")
    bare, bare_optimizer = new(foreach=True)
    train(bare, bare_optimizer, [x for index, x in enumerate(batches([])) if index != 3])
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), bare.parameters(), strict=True))
    finding = origins(sink)[0]
    assert (finding.step, finding.data["origin"]["op"]) == (4, "aten.log.default")
    assert finding.data["origin"]["line"]["line"] == LINE


def test_stop_raises_before_the_weights_are_spoilt(tmp_path):
    model, optimizer = new(foreach=True)
    with pytest.raises(NonFiniteError, match="`log`"):
        watched(tmp_path / "run", model, optimizer, batches([5]), guard="stop")
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_stop_with_a_fused_optimizer_comes_later_and_the_weights_are_whole(tmp_path, no_waiting):
    model, optimizer = new(fused=True)
    data = batches([2], count=40)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise", guard="stop") as session:
        train(model, optimizer, data[:2])
        kept = [each.detach().clone() for each in model.parameters()]
        with no_waiting():
            train(model, optimizer, data[2:3])
        assert all(torch.equal(one, two) for one, two in zip(kept, model.parameters(), strict=True))
        assert session.flush()
        with pytest.raises(NonFiniteError, match=r"step 3: .* the weights are as they were"):
            train(model, optimizer, data[3:])
    assert all(torch.equal(one, two) for one, two in zip(kept, model.parameters(), strict=True))


@pytest.mark.parametrize("bad", [0, 3])
def test_a_fused_sgd_may_skip_its_very_first_step(tmp_path, bad):
    """Torch leaves the momentum of a fused SGD unfilled in a first step that it skips itself."""
    results = []
    for watch in (True, False):
        torch.manual_seed(0)
        model = Net().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
        junk = [torch.full((5000,), float("nan"), device="cuda") for _ in range(50)]
        del junk  # what memory holds that nobody fills
        if watch:
            watched(tmp_path / "run", model, optimizer, batches([bad]), guard="skip")
        else:
            train(model, optimizer, [x for index, x in enumerate(batches([])) if index != bad])
        results.append(list(model.parameters()))
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_guard_reads_no_gradient_twice(tmp_path, no_waiting, monkeypatch):
    model, optimizer = new(fused=True)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise", guard="skip"):
        train(model, optimizer, batches([], count=2))
        monkeypatch.setattr("sonde.forensics.hold_back.any_nonfinite", None)  # would read them
        with no_waiting():
            train(model, optimizer, [torch.rand(4, 3, device="cuda") for _ in range(3)])


def test_without_a_guard_the_readings_name_the_module(tmp_path):
    model, optimizer = new()
    sink = watched(tmp_path / "run", model, optimizer, batches([3]))
    found = origins(sink)
    assert found
    assert found[0].data["origin"]["stage"] == "forward"
    assert found[0].step == 4


def test_a_bundle_of_a_gpu_step_is_confirmed(tmp_path):
    model, optimizer = new(foreach=True)
    watched(tmp_path / "run", model, optimizer, batches([3]), guard="skip")
    outcome = sonde.load_bundle(tmp_path / "run").replay(model)
    assert outcome.confirmed
    assert outcome.identical is True


@pytest.mark.parametrize("kind", ["fused", "foreach"])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_stop_late_takes_the_step_and_raises_when_the_readings_arrive(tmp_path, no_waiting, kind):
    model, optimizer = new(**{kind: True})
    data = batches([2], count=6)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise", guard="stop_late") as session:
        train(model, optimizer, data[:2])
        with no_waiting():
            train(model, optimizer, data[2:3])
        assert session.flush()
        with pytest.raises(NonFiniteError, match=r"step 3: .* 1 step\(s\) were taken, .* before step 3\."):
            train(model, optimizer, data[3:])
        assert session.current_step == 4
    assert not all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert not hasattr(optimizer, "found_inf")


def test_stop_late_lets_a_program_go_on_from_a_checkpoint(tmp_path):
    model, optimizer = new(foreach=True)
    data = batches([2], count=8)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise", guard="stop_late") as session:
        train(model, optimizer, data[:2])
        kept = {name: each.clone() for name, each in model.state_dict().items()}
        state = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(NonFiniteError):
            for x in data[2:5]:
                train(model, optimizer, [x])
                session.flush()
        model.load_state_dict(kept)
        optimizer.load_state_dict(state)
        for x in data[5:]:
            train(model, optimizer, [x])
            session.flush()
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


class Deep(nn.Module):
    """Many small parameters; returns its hidden states."""

    def __init__(self, layers=40, width=64):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        states = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            states.append(x)
        return x, tuple(states[:-1])


def waits_of(function):
    """Return how often a function makes this thread wait for the device, as torch counts."""
    caught, here = [], threading.get_ident()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *_, **__: caught.append((threading.get_ident(), str(message)))
            function()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum(thread == here and "synchronizing" in message for thread, message in caught)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_when_armed_a_step_waits_a_few_times_and_not_once_per_parameter(tmp_path):
    torch.manual_seed(0)
    model = Deep().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(spoil=False):
        optimizer.zero_grad()
        model(torch.rand(8, 64, device="cuda"))[0].sum().backward()
        if spoil:
            model.layers[0].weight.grad[0, 0] = float("nan")
        optimizer.step()

    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise") as session:
        step()
        step(spoil=True)
        with torch.no_grad():
            model.layers[0].weight.fill_(0.01)  # somebody mends it
        assert session.flush()
        assert session._pipeline.forensics.watcher.recent.bad_step == 2
        assert 1 <= waits_of(step) <= 8


def test_what_is_held_on_the_device_stays_within_its_bounds(tmp_path, monkeypatch):
    one = 1024 * 64 * 4
    monkeypatch.setattr("sonde.forensics.keeper.MAX_GRADIENT_BYTES", 20 * one)
    monkeypatch.setattr("sonde.forensics.keeper.MAX_INPUT_BYTES", 2 * one)

    def held(watch):
        torch.manual_seed(0)
        model = Deep().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        session = watch(model, optimizer) if watch else contextlib.nullcontext()
        with session:
            for _ in range(2):
                optimizer.zero_grad()
                for _ in range(6):
                    model(torch.rand(1024, 64, device="cuda"))[0].sum().backward()
                torch.cuda.synchronize()
                found = torch.cuda.memory_allocated()
                optimizer.step()
        return found

    bare = held(None)
    watched = held(
        lambda *args: sonde.watch(
            *args, run=tmp_path / "run", on_error="raise", diagnose=False, what=["gradients"], guard="stop_late"
        )
    )
    assert watched - bare < 24 * one + (8 << 20)  # and the arenas


def test_a_backward_is_captured_while_something_is_wrong(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.rand(4, 8, device="cuda")
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise", guard="skip") as session:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                optimizer.zero_grad(set_to_none=True)
                model(x).sum().backward()
        torch.cuda.current_stream().wait_stream(side)
        session._pipeline.forensics.watcher.recent.bad_step = 1  # armed: it would read the loss
        optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = model(x).sum()
            loss.backward()
        session._pipeline.forensics.watcher.recent.forget_bad()
        graph.replay()
        torch.cuda.synchronize()
    assert torch.isfinite(loss).item()
