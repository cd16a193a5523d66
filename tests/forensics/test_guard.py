"""The guard: a non-finite update is not written, and everything else is as if the step had not been."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sonde
from sonde.errors import NonFiniteError, OptionError
from sonde.record.kinds import skips_on_device
from sonde.testing import MemorySink

OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, foreach=False),
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1),
}


def batches(bad):
    generator = torch.Generator().manual_seed(2)
    made = [torch.randn(4, 3, generator=generator) for _ in range(4)]
    if bad is not None:
        made[bad][1, 1] = float("inf")
    return made


def train(model, optimizer, data, session=None):
    for x in data:
        optimizer.zero_grad()
        F.mse_loss(model(x), torch.ones(4, 1)).backward()
        optimizer.step()
        if session is not None:
            yield session


def new(kind):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    return model, OPTIMIZERS[kind](model.parameters())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_skipped_step_leaves_weights_and_state_as_if_it_had_not_been(kind, tmp_path):
    sink = MemorySink()
    model, optimizer = new(kind)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise", guard="skip") as session:
        session.subscribe(sink)
        list(train(model, optimizer, batches(bad=1), session))
        assert all(parameter.grad is not None for parameter in model.parameters())
    bare, bare_optimizer = new(kind)
    list(train(bare, bare_optimizer, [x for index, x in enumerate(batches(None)) if index != 1]))
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), bare.parameters(), strict=True))
    for state, other in zip(optimizer.state.values(), bare_optimizer.state.values(), strict=True):
        for key, value in state.items():
            assert value is None or torch.equal(torch.as_tensor(value), torch.as_tensor(other[key])), key
    assert {block.step: block.skipped for block in sink.blocks if block.step} == {1: False, 2: True, 3: False, 4: False}
    assert [event.step for event in sink.events if event.event_type == "guard_skipped"] == [2]


def test_stop_raises_before_anything_is_written_and_names_the_operation(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 1)

        def forward(self, x):
            return torch.log(self.fc(x) * 0)

    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise", guard="stop"):
        model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(NonFiniteError, match=r"`log` in \(model\) at test_guard.py:\d+ .*logarithm of 0"):
            optimizer.step()
        assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), before, strict=True))
    assert not optimizer.state
    assert isinstance(NonFiniteError("x"), sonde.NonFiniteError)


def test_the_guard_also_holds_in_steps_that_are_not_recorded(tmp_path):
    model, optimizer = new("SGD")
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise", guard="skip", every=100):
        list(train(model, optimizer, batches(bad=2)))
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_without_a_guard_the_update_is_written(tmp_path):
    model, optimizer = new("SGD")
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise"):
        list(train(model, optimizer, batches(bad=2)))
    assert not all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_a_guard_that_means_nothing_is_refused(tmp_path):
    with pytest.raises(OptionError, match="choose 'skip', 'stop' or 'stop_late'"):
        sonde.watch(nn.Linear(1, 1), run=tmp_path / "run", guard="halt")


def test_an_optimizer_that_raises_does_not_lose_the_gradients(tmp_path):
    model, optimizer = new("SGD")
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise", guard="skip"):
        model(batches(bad=0)[0]).sum().backward()
        optimizer.param_groups[0]["lr"] = "fast"
        handle = optimizer.register_step_pre_hook(lambda *args: (_ for _ in ()).throw(ValueError("user")))
        with pytest.raises(ValueError, match="user"):
            optimizer.step()
        handle.remove()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_gradient_scaler_keeps_its_own_counsel(tmp_path):
    """A scaler that calibrates skips steps by itself: neither a finding nor a second guard."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38)
    sink = MemorySink()
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise", scaler=scaler, guard="skip") as session:
        session.subscribe(sink)
        for x in batches(None)[:2]:
            optimizer.zero_grad()
            scaler.scale(F.mse_loss(model(x * 100), torch.ones(4, 1))).backward()
            scaler.step(optimizer)
            scaler.update()
    assert [block.skipped for block in sink.blocks if block.step] == [True, True]
    assert not [event for event in sink.events if event.event_type == "guard_skipped"]
    assert not [finding for finding in sink.findings if "origin" in finding.data]


def test_only_an_optimizer_that_knows_how_is_left_to_skip_by_itself():
    """On a device; what merely calls itself fused would write what it was to leave out."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    fused = torch.optim.AdamW([parameter], fused=True)
    assert skips_on_device(fused)
    assert not skips_on_device(torch.optim.AdamW([parameter], foreach=True))
    for group in (other := torch.optim.AdamW([parameter])).param_groups:
        group["fused"] = True
    assert not skips_on_device(other)
    momentum = torch.optim.SGD([parameter], 0.1, momentum=0.9, fused=True)
    assert not skips_on_device(momentum), "its momentum would never be filled"
    momentum.step()
    assert skips_on_device(momentum)
