"""`guard="stop_late"`: the optimizer is left alone, nothing waits, and the program stops when the readings say so."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sonde
from sonde.core import schema
from sonde.errors import NonFiniteError, OptionError
from sonde.testing import MemorySink


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(torch.log(self.fc(x).sigmoid() * (x[:, :1] > 0)))


def new():
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def batches(bad=None, count=8):
    generator = torch.Generator().manual_seed(1)
    made = [torch.rand(4, 3, generator=generator) + 0.1 for _ in range(count)]
    if bad is not None:
        made[bad][2] = -1.0
    return made


def step(model, optimizer, x):
    optimizer.zero_grad()
    F.mse_loss(model(x), torch.ones(len(x), 1)).backward()
    optimizer.step()


def weights(model):
    return [each.detach().clone() for each in model.parameters()]


def same(one, two):
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("every", [1, 100])
def test_on_the_cpu_it_stops_in_the_same_step_before_anything_is_written(every, tmp_path):
    model, optimizer = new()
    data = batches(bad=2)
    with sonde.watch(
        model, optimizer, run=tmp_path / "run", on_error="raise", guard="stop_late", every=every
    ) as session:
        for x in data[:2]:
            step(model, optimizer, x)
        before = weights(model)
        with pytest.raises(NonFiniteError, match=r"^step 3: gradients are .*before anything was written.*`log` in"):
            step(model, optimizer, data[2])
        assert same(weights(model), before)
        assert session.current_step == 3
        for x in data[3:]:
            step(model, optimizer, x)
    bare, bare_optimizer = new()
    for x in [*data[:2], *data[3:]]:
        step(bare, bare_optimizer, x)
    assert same(weights(model), weights(bare))


@pytest.mark.usefixtures("as_if_on_a_device")
@pytest.mark.parametrize("late_by", [1, 3])
def test_on_a_device_it_stops_when_the_readings_arrive_and_names_the_step_in_which_it_began(late_by, tmp_path):
    model, optimizer = new()
    data = batches(bad=2)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise", guard="stop_late", every=1) as session:
        keep_readings_back(session)
        for x in data[: 2 + late_by]:
            step(model, optimizer, x)
        let_readings_through(session)
        before = weights(model)
        with pytest.raises(NonFiniteError) as caught:
            step(model, optimizer, data[2 + late_by])
        assert str(caught.value).startswith("step 3: gradients or weights are not finite.")
        assert f" {late_by} step(s) were taken, this one included" in str(caught.value)
        assert "the weights may be spoilt. Go back to a checkpoint from before step 3." in str(caught.value)
        assert same([each.isnan() for each in before], [each.isnan() for each in weights(model)])
        assert all(each.isnan().any() for each in before)
    assert "The first NaN appears in head." in str(caught.value)
    assert str(caught.value).endswith("names the operation when it comes again.")


def keep_readings_back(session):
    recent = session._pipeline.forensics.watcher.recent
    session.held = []
    recent.take_block = session.held.append


def let_readings_through(session):
    assert session.flush()
    recent = session._pipeline.forensics.watcher.recent
    del recent.take_block
    for block in session.held:
        recent.take_block(block)


@pytest.mark.usefixtures("as_if_on_a_device")
def test_a_program_that_goes_back_to_a_checkpoint_can_go_on(tmp_path):
    model, optimizer = new()
    data = batches(bad=2)
    good = model.state_dict()
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise", guard="stop_late") as session:
        for index, x in enumerate(data[:3]):
            step(model, optimizer, x)
            if index == 1:
                good = {name: each.clone() for name, each in model.state_dict().items()}
        assert session.flush()
        with pytest.raises(NonFiniteError):
            step(model, optimizer, data[3])
        model.load_state_dict(good)
        for x in data[3:]:
            step(model, optimizer, x)
            assert session.flush()  # readings of spoilt steps that come late do not stop it again
        with pytest.raises(NonFiniteError, match="step 10: "):
            step(model, optimizer, torch.full((4, 3), float("nan")))
            session.flush()
            step(model, optimizer, data[0])
    assert all(torch.isfinite(each).all() for each in good.values())


@pytest.mark.usefixtures("as_if_on_a_device")
def test_the_optimizer_is_never_touched(tmp_path):
    model, optimizer = new()
    bare, bare_optimizer = new()
    seen = []
    handle = optimizer.register_step_pre_hook(
        lambda *_: seen.append([each.grad is None for each in model.parameters()] + [hasattr(optimizer, "found_inf")])
    )
    data = batches(bad=1, count=3)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise", guard="stop_late") as session:
        keep_readings_back(session)
        for x in data:
            step(model, optimizer, x)
            step(bare, bare_optimizer, x)
    handle.remove()
    assert not any(map(any, seen))
    assert same([each.nan_to_num() for each in weights(model)], [each.nan_to_num() for each in weights(bare)])


def test_an_update_that_is_not_finite_stops_the_next_step(tmp_path):
    model, optimizer = new()
    data = batches()
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise", guard="stop_late"):
        step(model, optimizer, data[0])
        optimizer.param_groups[0]["lr"] = float("inf")
        step(model, optimizer, data[1])
        optimizer.zero_grad()
        model.fc.weight.grad = torch.zeros_like(model.fc.weight)  # nothing about it is bad
        with pytest.raises(NonFiniteError, match=r"^step 2: .* 1 step\(s\) were taken, .*optimizer's update"):
            optimizer.step()


@pytest.mark.parametrize("on_device", [False, True])
def test_a_parameter_of_infinities_that_are_meant_stops_nothing_and_is_not_reported(on_device, tmp_path, request):
    if on_device:
        request.getfixturevalue("as_if_on_a_device")

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)
            self.mask = nn.Parameter(torch.full((3, 3), float("-inf")).triu(1), requires_grad=False)

        def forward(self, x):
            return F.softmax(self.fc(x) @ torch.ones(3, 3) + self.mask, -1)

    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise", guard="stop_late") as session:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.rand(3, 3)).pow(2).sum().backward()
            optimizer.step()
            session.flush()
    assert not [each for each in session.findings if "origin" in each.data]


def test_a_gradient_scaler_keeps_its_own_counsel(tmp_path):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38)
    with sonde.watch(
        model, optimizer, run=tmp_path / "run", on_error="raise", scaler=scaler, guard="stop_late"
    ) as session:
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(F.mse_loss(model(torch.ones(4, 3) * 100), torch.ones(4, 1))).backward()
            scaler.step(optimizer)
            scaler.update()
            session.flush()


@pytest.mark.parametrize("guard", ["stop", "stop_late"])
def test_a_stop_reports_its_own_cause_and_releases_its_batch(guard, tmp_path):
    model, optimizer = new()
    ones = torch.ones(4, 3)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise", guard=guard) as session:
        for spoil, told in ((-ones, "`log`"), (-ones, "`log`"), (ones * float("nan"), "batch holds NaN"), (None, "")):
            step(model, optimizer, ones)
            with pytest.raises(NonFiniteError) as caught:
                if spoil is None:
                    spoil_gradient(model)
                    optimizer.step()
                else:
                    step(model, optimizer, spoil)
            assert told in str(caught.value)
            assert not session._pipeline.forensics.watcher.keeper.passes
        assert "log" not in str(caught.value)
        assert "batch" not in str(caught.value)


def spoil_gradient(model):
    model.fc.weight.grad.fill_(float("nan"))  # by hand, where no pass can tell


def test_without_readings_to_go_by_it_is_refused(tmp_path):
    with pytest.raises(OptionError, match="add 'gradients' to what"):
        sonde.watch(nn.Linear(1, 1), run=tmp_path / "run", guard="stop_late", what=["outputs"])


@pytest.mark.parametrize("guard", ["stop", "stop_late"])
def test_a_step_that_stopped_the_program_is_recorded_as_skipped_and_not_mixed_into_another(guard, tmp_path):
    model, optimizer = new()
    data = batches(bad=1, count=3)
    sink = MemorySink()
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise", guard=guard) as session:
        session.subscribe(sink)
        step(model, optimizer, data[0])
        with pytest.raises(NonFiniteError):
            step(model, optimizer, data[1])
        step(model, optimizer, data[2])  # whoever catches it can go on
    assert {block.step: block.skipped for block in sink.blocks if block.step} == {1: False, 2: True, 3: False}
    readings = sink.readings("fc.weight:gradient")
    found = {at: bool(reading.row[schema.NAN : schema.NEG_INF + 1].any()) for at, reading in readings.items()}
    assert found == {1: False, 2: True, 3: False}
