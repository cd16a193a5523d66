"""Recovery acts only when called, does what it says, and is noted."""

from __future__ import annotations

import math

import pytest
import torch
from tests.pytorch_debugging.conftest import batch, kinds, small_model
from torch import nn

from sonde.errors import OptionError
from sonde.pytorch_debugging import LastGood, recovery


def with_gradients(model):
    x, y = batch()
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    return model


def test_values_that_are_not_finite_are_replaced_and_counted(make):
    debugger, model = make(), with_gradients(small_model())
    rest = model[2].weight.grad[1:].clone()
    model[2].weight.grad[0] = math.nan
    model[0].bias.grad[0] = -math.inf
    assert recovery.replace_nonfinite_(model, debugger=debugger) == 8 + 1
    assert torch.equal(model[2].weight.grad[0], torch.zeros(8))
    assert torch.equal(model[2].weight.grad[1:], rest)
    assert kinds(debugger) == ["recovery_replaced_nonfinite"]
    assert recovery.replace_nonfinite_(model, debugger=debugger) == 0
    assert len(debugger.debug_events) == 1


def test_parameters_and_plain_tensors_are_replaced_too(make):
    model, plain = small_model(), torch.tensor([math.inf, 1.0])
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    assert recovery.replace_nonfinite_(model, 0.5, of="parameters") == 1
    assert model[0].weight[0, 0].item() == 0.5
    assert recovery.replace_nonfinite_([plain]) == 1
    assert plain.tolist() == [0.0, 1.0]
    with pytest.raises(OptionError, match="choose 'parameters' or 'gradients'"):
        recovery.replace_nonfinite_(model, of="buffers")


def test_clipping_scales_as_torch_does_and_leaves_what_is_not_finite_alone(make):
    debugger = make()
    ours, theirs = with_gradients(small_model()), with_gradients(small_model())
    norm = recovery.clip_gradients_(ours, 0.01, debugger=debugger)
    assert norm == pytest.approx(nn.utils.clip_grad_norm_(theirs.parameters(), 0.01).item(), rel=1e-6)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-8)
    before = ours[0].weight.grad.clone()
    ours[2].bias.grad[0] = math.nan
    assert math.isnan(recovery.clip_gradients_(ours, 0.001, debugger=debugger))
    assert torch.equal(ours[0].weight.grad, before)
    assert kinds(debugger) == ["recovery_clipped", "recovery_clip_refused"]


def test_a_step_is_skipped_only_if_a_gradient_is_not_finite(make):
    debugger, model = make(), with_gradients(small_model())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = model[0].weight.detach().clone()
    assert recovery.step_if_finite(model, optimizer, debugger=debugger)
    assert not torch.equal(model[0].weight, before)
    with_gradients(model)[0].weight.grad[0, 0] = math.inf
    before = model[0].weight.detach().clone()
    assert not recovery.step_if_finite(model, optimizer, debugger=debugger)
    assert torch.equal(model[0].weight, before)
    assert model[0].weight.grad is None
    assert kinds(debugger) == ["recovery_skipped_step"]


@pytest.mark.parametrize("tensor", [False, True])
def test_the_learning_rate_is_lowered_in_every_group(make, tensor):
    debugger, model = make(), small_model()
    rate = torch.tensor(0.1) if tensor else 0.1
    groups = [{"params": model[0].parameters(), "lr": rate}, {"params": model[2].parameters(), "lr": 1e-4}]
    optimizer = torch.optim.SGD(groups, 0.1)
    assert recovery.lower_learning_rate(optimizer, 0.1, minimum=1e-3, debugger=debugger) == pytest.approx([0.01, 1e-4])
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.01)
    assert kinds(debugger) == ["recovery_lowered_learning_rate"]
    with pytest.raises(OptionError, match="between 0 and 1"):
        recovery.lower_learning_rate(optimizer, 2.0)


def test_rolling_back_restores_weights_and_optimizer_state_exactly(make):
    debugger, model = make(), small_model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    good = LastGood(model, optimizer, debugger=debugger)

    def train(steps):
        for step in range(steps):
            x, y = batch(step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return [each.detach().clone() for each in model.parameters()]

    train(3)
    assert good.remember()
    expected = train(4)
    for _ in range(2):  # going back twice to the same copy works as well
        with torch.no_grad():
            model[0].weight.fill_(math.nan)
        assert not good.remember()
        good.restore()
        assert all(torch.equal(a, b) for a, b in zip(expected, train(4), strict=True))
    assert kinds(debugger) == ["recovery_rolled_back"] * 2


def test_copies_are_bounded_and_asking_for_more_is_an_error():
    model = small_model()
    good = LastGood(model, keep=2)
    with pytest.raises(OptionError, match="0 copies are kept"):
        good.restore()
    for value in (1.0, 2.0, 3.0):
        with torch.no_grad():
            model[0].bias.fill_(value)
        good.remember()
    assert len(good) == 2
    good.restore(steps_back=2)
    assert model[0].bias[0].item() == 2.0
