"""Debugged passes and steps compute what the plain calls compute, and tell what happened."""

from __future__ import annotations

import math

import pytest
import torch
from tests.pytorch_debugging.conftest import batch, kinds, small_model
from torch import nn

import sonde
from sonde.testing import assert_no_taps


def test_gradients_flow_through_a_debugged_forward_pass(make):
    debugger, model = make(), small_model()
    x, y = batch()
    loss = nn.functional.cross_entropy(debugger.debug_forward_pass(model, x, layer_hooks=True), y)
    debugger.debug_backward_pass(loss)
    debugged = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(debugged, model.parameters(), strict=True))


def test_the_table_of_layers_has_shapes_types_statistics_time_and_memory(make):
    debugger, model = make(), small_model()
    x, _ = batch()
    out = debugger.debug_forward_pass(model, x)
    assert list(debugger.last_forward) == ["0", "1", "2"]
    last = debugger.last_forward["2"]
    assert (last["class"], last["input_shape"], last["output_shape"]) == ("Linear", [[6, 8]], [6, 3])
    assert last["outputs"][0]["mean"] == pytest.approx(out.mean().item(), rel=1e-5)
    assert last["inputs"][0]["dtype"] == "float32"
    assert last["time_ms"] > 0
    assert last["output_bytes"] == 6 * 3 * 4
    event = debugger.debug_events[-1]
    assert event["event_type"] == "forward_pass_debug"
    assert event["data"]["activations"]["0"]["inputs"][0]["std"] == pytest.approx(x.std().item(), rel=1e-5)
    assert event["data"]["forward_time"] > 0


def test_integer_inputs_and_tuple_outputs_work(make):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn = nn.Embedding(9, 4), nn.GRU(4, 3, batch_first=True)

        def forward(self, tokens):
            return {"states": self.rnn(self.embed(tokens)), "tokens": tokens}

    debugger = make()
    out = debugger.debug_forward_pass(Net(), torch.randint(9, (2, 5)))
    assert set(out) == {"states", "tokens"}
    assert debugger.last_forward["embed"]["inputs"][0]["dtype"] == "int64"
    assert [each["part"] for each in debugger.last_forward["rnn"]["outputs"]] == ["[0]", "[1]"]


def test_hooks_are_removed_when_forward_raises_and_the_error_goes_on(make):
    debugger, model = make(), small_model()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        debugger.debug_forward_pass(model, torch.ones(2, 5))
    assert_no_taps(model)
    event = debugger.debug_events[-1]
    assert event["event_type"] == "forward_pass_error"
    assert event["data"]["last_call"] == "0"
    assert "shapes cannot be multiplied" in event["data"]["stack_trace"]


def test_without_debug_mode_the_plain_calls_run(make):
    debugger, model = make(debug_mode=False), small_model()
    x, y = batch()
    assert torch.equal(debugger.debug_forward_pass(model, x), model(x))
    debugger.debug_backward_pass(nn.functional.cross_entropy(model(x), y))
    assert model[0].weight.grad is not None
    assert kinds(debugger) == []


def test_a_backward_pass_reports_every_gradient_by_name(make):
    debugger, model = make(), small_model()
    x, y = batch()
    debugger.debug_backward_pass(nn.functional.cross_entropy(debugger.debug_forward_pass(model, x), y))
    data = debugger.debug_events[-1]["data"]
    assert set(data["gradients"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert data["gradients"]["2.bias"]["norm"] == pytest.approx(model[2].bias.grad.norm().item(), rel=1e-6)
    assert data["backward_time"] > 0


@pytest.mark.parametrize(("bad", "kind"), [(math.nan, "nan_loss_detected"), (math.inf, "inf_loss_detected")])
def test_a_loss_that_is_not_finite_is_reported_and_backward_still_runs(make, bad, kind):
    debugger, model = make(), small_model()
    loss = model(batch()[0]).sum() * bad
    debugger.debug_backward_pass(loss, retain_graph=True)
    assert kind in kinds(debugger)
    loss.backward()  # the graph was kept, as asked


def test_a_backward_that_raises_is_reported_and_goes_on(make):
    debugger, model = make(), small_model()
    loss = model(batch()[0]).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        debugger.debug_backward_pass(loss)
    assert kinds(debugger)[-1] == "backward_pass_error"


@pytest.mark.parametrize("checking", [True, False])
def test_debug_training_step_trains_bit_identically_to_the_plain_step(make, checking):
    def train(step):
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        torch.manual_seed(1)
        for number in range(8):
            step(model, *batch(number), optimizer)
        return model.state_dict()

    def plain(model, x, y, optimizer):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    debugger = make(enable_gradient_checking=checking)

    def debugged(model, x, y, optimizer):
        info = debugger.debug_training_step(model, x, y, nn.functional.cross_entropy, optimizer)
        assert set(info) == {"forward_outputs", "loss", "gradient_norm", "parameter_stats"}
        assert (info["gradient_norm"] is None) == (not checking)
        assert not info["forward_outputs"].requires_grad

    torch.manual_seed(0)
    expected = train(plain)
    torch.manual_seed(0)
    found = train(debugged)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_steps_are_in_the_run(make):
    debugger, model = make(), small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = [
        debugger.debug_training_step(model, *batch(step), nn.functional.cross_entropy, optimizer)["loss"]
        for step in range(4)
    ]
    debugger.close()
    run = sonde.open_run(debugger.run)
    assert run.series("loss:scalar", "mean").values == pytest.approx(losses)
    for key in ("0.weight:gradient", "0.weight:parameter", "1:output", "forward_seconds:scalar"):
        assert run.series(key, "mean").steps.tolist() == [1, 2, 3, 4], key


def test_an_error_in_a_step_is_reported_and_goes_on(make):
    debugger, model = make(), small_model()

    def loss_fn(out, target):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        debugger.debug_training_step(model, *batch(), loss_fn, torch.optim.SGD(model.parameters(), 0.1))
    assert kinds(debugger)[-1] == "training_step_error"
