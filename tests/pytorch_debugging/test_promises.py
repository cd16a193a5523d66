"""The promises that older tools of this kind made in their documents and broke: one test for each, named after it.

Some have longer tests elsewhere in this folder; here they can be read off one by one.
"""

from __future__ import annotations

import asyncio
import json
import math

import pytest
import torch
import torch.nn.functional as F
from tests.pytorch_debugging.conftest import batch, kinds, small_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sonde.pytorch_debugging import (
    TrainingLogger,
    create_enhanced_training_optimizer,
    create_pytorch_debugger,
    debug_training_session,
)
from sonde.pytorch_debugging.recovery import clip_gradients_, replace_nonfinite_
from sonde.testing import FakeClock, assert_no_taps


def parts():
    model = small_model()
    return model, torch.optim.SGD(model.parameters(), 0.1)


def strict(path):
    def refuse(token):
        raise AssertionError(f"{token} is no JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def test_debug_training_step_works_in_debug_mode(make):
    model, optimizer = parts()
    before = model[0].weight.clone()
    found = make().debug_training_step(model, *batch(), F.cross_entropy, optimizer)
    assert not torch.equal(before, model[0].weight)
    assert set(found) == {"forward_outputs", "loss", "gradient_norm", "parameter_stats"}


def test_forward_then_backward_debugging_works(make):
    model, _ = parts()
    debugger = make()
    x, y = batch()
    debugger.debug_backward_pass(F.cross_entropy(debugger.debug_forward_pass(model, x), y))
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_profiling_produces_a_trace(make, tmp_path):
    model, optimizer = parts()
    with make().profiling(output_file=tmp_path / "profile.json"):
        make().debug_training_step(model, *batch(), F.cross_entropy, optimizer)
    assert any(event.get("name") == "aten::addmm" for event in strict(tmp_path / "profile.json")["traceEvents"])


def test_memory_tracking_swallows_no_exception(make):
    with pytest.raises(ZeroDivisionError), make().memory_tracking(enabled=True):
        raise ZeroDivisionError


def test_snapshots_violations_and_times_are_in_the_report(make):
    model, optimizer = parts()
    debugger = make(enable_memory_tracking=True)
    with debugger.memory_tracking():
        debugger.debug_training_step(model, *batch(), F.cross_entropy, optimizer, gradient_threshold=1e-9)
    report = strict(debugger.save_debug_report())
    assert len(report["memory_snapshots"]) == 2
    assert report["gradient_violations"]
    assert report["debug_summary"]["gradient_violations_count"] == 1
    assert (len(debugger.forward_times), len(debugger.backward_times)) == (1, 1)


def test_nan_handling_and_clipping_exist_and_happen_only_when_asked(make):
    model, _ = parts()
    debugger = make()
    x, y = batch()
    F.cross_entropy(model(x), y).backward()
    model[0].weight.grad[0, 0] = math.nan
    debugger.check_gradients(model)
    assert torch.isnan(model[0].weight.grad).any()  # a check only looks
    assert replace_nonfinite_(model, debugger=debugger) == 1
    assert torch.isfinite(model[0].weight.grad).all()
    clip_gradients_(model, 0.01, debugger=debugger)
    assert debugger.check_gradients(model) == pytest.approx(0.01, rel=1e-3)


def test_ordinary_training_is_not_an_explosion_and_nan_is_one(make):
    model, optimizer = parts()
    debugger = make()
    for seed in range(30):
        x, y = batch(seed)
        optimizer.zero_grad()
        (3 * F.cross_entropy(model(x), y)).backward()
        debugger.check_gradients(model)
        optimizer.step()
    assert debugger.gradient_explosions == 0
    model[0].weight.grad.fill_(math.nan)
    debugger.check_gradients(model)
    assert debugger.gradient_explosions == 1


def test_tuple_outputs_and_integer_inputs_are_debugged(make):
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.reader = nn.Embedding(5, 4), nn.LSTM(4, 3)

        def forward(self, tokens):
            return self.reader(self.embedding(tokens))

    debugger = make()
    debugger.debug_forward_pass(Reader(), torch.tensor([[1, 2], [3, 4]]))
    assert {"embedding", "reader"} <= set(debugger.last_forward)


def test_hooks_are_removed_when_forward_raises(make):
    model, _ = parts()
    with pytest.raises(RuntimeError):
        make().debug_forward_pass(model, torch.ones(2, 99))
    assert_no_taps(model)


def test_parameters_are_reported_by_name(make):
    model, _ = parts()
    debugger = make()
    x, y = batch()
    F.cross_entropy(model(x), y).backward()
    model[2].bias.grad.fill_(math.inf)
    debugger.check_gradients(model)
    assert "2.bias" in next(event["message"] for event in debugger.debug_events if "inf" in event["event_type"])


def test_debug_training_session_uses_the_model_and_enters_what_its_flags_name():
    model, optimizer = parts()
    with debug_training_session(model, enable_anomaly_detection=True, enable_memory_tracking=True) as debugger:
        assert torch.is_anomaly_enabled()
        x, y = batch()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert not torch.is_anomaly_enabled()
    assert {"anomaly_detection_start", "memory_tracking_start"} <= set(kinds(debugger))
    assert debugger.run is not None


def test_the_report_is_strict_json_even_with_nan_and_tensors(make):
    debugger = make()
    debugger._log_debug_event("odd", "odd values", {"nan": math.nan, "tensor": torch.ones(3), "set": {1}})
    assert strict(debugger.save_debug_report())["debug_events"]


def test_the_training_optimizer_can_be_built_and_the_model_learns(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 16)
    optimizer = create_enhanced_training_optimizer(
        small_model(), loader, loader, max_epochs=8, learning_rate=0.05, log_level="ERROR",
        log_dir=tmp_path / "logs", checkpoint_dir=tmp_path / "runs",
    )  # fmt: skip

    async def train():
        return await optimizer.train()

    history = asyncio.run(train())["history"]
    optimizer.cleanup()
    losses = [epoch["loss"] for epoch in history.values()]
    assert losses[-1] < 0.7 * losses[0]


def test_errors_are_logged_durations_measured_and_final_metrics_kept(tmp_path):
    clock = FakeClock()
    logger = TrainingLogger(log_dir=tmp_path, experiment_name="exp", log_level="CRITICAL", clock=clock)
    with logger.training_context(), logger.epoch_context(0):
        clock.advance(2.0)
        logger.log_metrics({"loss": 0.5}, step=0, epoch=0)
        logger.log_warning("a warning")
        logger.log_error(ValueError("an error"))
    logger.close()
    report = strict(tmp_path / "exp_report.json")
    assert (report["final_metrics"], report["duration"]) == ({"loss": 0.5}, 2.0)
    assert "an error" in (tmp_path / "exp_events.jsonl").read_text()


def test_both_factories_keep_their_own_defaults(tmp_path):
    made = create_pytorch_debugger(log_dir=tmp_path)
    assert (made.debug_mode, made.enable_gradient_checking, made.enable_profiling) == (True, True, False)
    made.close()
