"""Checks of gradients and parameters: numbers, names, counters, and what they are held against."""

from __future__ import annotations

import json
import math

import pytest
import torch
from tests.pytorch_debugging.conftest import batch, kinds, small_model
from torch import nn

import sonde
from sonde.errors import OptionError


def with_gradients(model, scale=1.0):
    x, y = batch()
    model.zero_grad()
    (nn.functional.cross_entropy(model(x), y) * scale).backward()
    return model


def test_the_total_norm_is_that_of_all_gradients(make):
    model = with_gradients(small_model())
    expected = torch.cat([each.grad.flatten().double() for each in model.parameters()]).norm()
    assert make().check_gradients(model) == pytest.approx(float(expected), rel=1e-6)


def test_none_if_checking_is_off_and_zero_without_gradients(make):
    assert make(enable_gradient_checking=False).check_gradients(with_gradients(small_model())) is None
    debugger = make()
    assert debugger.check_gradients(small_model()) == 0.0
    assert kinds(debugger) == ["no_gradients"]


def test_a_given_threshold_decides(make):
    debugger, model = make(), with_gradients(small_model(), scale=100.0)
    norm = debugger.check_gradients(model, gradient_threshold=1.0)
    assert norm > 1.0
    assert debugger.gradient_explosions == 1
    assert kinds(debugger) == ["gradient_explosion"]
    assert debugger.gradient_violations[0]["data"]["threshold"] == 1.0
    debugger.check_gradients(model, gradient_threshold=2 * norm)
    assert debugger.gradient_explosions == 1


def test_explosion_does_not_fire_on_ordinary_training_without_a_threshold(make):
    debugger, model = make(), small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    norms = []
    for step in range(60):
        x, y = batch(step)
        optimizer.zero_grad()
        (10 * nn.functional.cross_entropy(model(x), y)).backward()
        norms.append(debugger.check_gradients(model))
        optimizer.step()
    assert max(norms) > 1.0  # a fixed threshold of 1 would have fired
    assert debugger.gradient_explosions == debugger.gradient_vanishing == 0


@pytest.mark.parametrize(("scale", "kind"), [(1e3, "gradient_explosion"), (1e-5, "gradient_vanishing")])
def test_an_unusual_norm_is_reported_by_default_in_words_that_name_its_window(make, scale, kind):
    debugger, model = make(), small_model()
    for _ in range(20):
        debugger.check_gradients(with_gradients(model))
    debugger.check_gradients(with_gradients(model, scale))
    assert kinds(debugger) == [kind]
    message = debugger.debug_events[0]["message"]
    assert "its usual 0.511" in message
    assert "at this step only" in message


@pytest.mark.parametrize("threshold", [None, 1.0, 1e9])
def test_nan_counts_as_an_explosion_too(make, threshold):
    debugger, model = make(), with_gradients(small_model())
    model[2].weight.grad[0, 0] = math.nan
    assert math.isnan(debugger.check_gradients(model, threshold))
    assert (debugger.nan_detections, debugger.inf_detections, debugger.gradient_explosions) == (1, 0, 1)


def test_parameters_are_reported_by_name_not_by_index(make):
    debugger, model = make(), with_gradients(small_model())
    model[0].bias.grad[1] = math.inf
    model[2].weight.grad[0, 0] = math.nan
    debugger.check_gradients(model)
    found = debugger.last_gradients
    assert (found.nan, found.inf) == ({"2.weight": 1}, {"0.bias": 1})
    assert found.norms["0.weight"] == pytest.approx(float(model[0].weight.grad.norm()), rel=1e-6)
    messages = [event["message"] for event in debugger.debug_events]
    assert messages[0] == "NaN in 1 gradient, first 2.weight (1 elements)"
    assert messages[1] == "Inf in 1 gradient, first 0.bias (1 elements)"


def test_gradient_violations_are_appended_and_counted(make):
    debugger, model = make(), with_gradients(small_model(), 100.0)
    for _ in range(3):
        debugger.check_gradients(model, 1.0)
    assert len(debugger.gradient_violations) == 3
    assert debugger.get_debug_summary()["gradient_violations_count"] == 3


def test_vanished_gradients_are_counted(make):
    debugger = make()
    debugger.check_gradients(with_gradients(small_model(), 1e-12))
    assert debugger.gradient_vanishing == 1


def test_checks_are_in_the_run_as_readings_step_by_step(make):
    debugger, model = make(), small_model()
    norms = [debugger.check_gradients(with_gradients(model, scale)) for scale in (1.0, 2.0, 3.0)]
    debugger.check_model_parameters(model)
    debugger.close()
    run = sonde.open_run(debugger.run)
    assert run.series("gradient_norm:scalar", "mean").values == pytest.approx(norms)
    assert run.series("2.weight:gradient", "norm").steps.tolist() == [1, 2, 3]
    assert run.series("2.weight:parameter", "norm").steps.tolist() == [3]


def test_parameter_statistics_are_those_of_numpy(make):
    model = small_model()
    with torch.no_grad():
        model[0].weight[0] = 0.0
        model[2].weight[0, 0] = math.nan
        model[2].weight[0, 1] = -math.inf
        model[2].bias.fill_(3.0)
        model[0].bias[0] = 1e6
    debugger = make()
    stats = debugger.check_model_parameters(model)
    assert stats["total_parameters"] == sum(each.numel() for each in model.parameters())
    assert (stats["nan_parameters"], stats["inf_parameters"], stats["zero_parameters"]) == (1, 1, 4)
    assert stats["constant_parameters"] == ["2.bias"]
    assert stats["out_of_range_parameters"] == ["0.bias"]
    weight = model[0].weight.detach().double().numpy()
    assert stats["parameter_ranges"]["0.weight"] == pytest.approx(
        {"min": weight.min(), "max": weight.max(), "mean": weight.mean(), "std": weight.std(ddof=1)}, rel=1e-5
    )
    assert set(kinds(debugger)) == {
        "nan_parameter_detected",
        "inf_parameter_detected",
        "out_of_range_parameter_detected",
        "parameter_check_completed",
    }
    json.dumps(stats, allow_nan=False)


def test_all_gradients_come_in_one_transfer(make, monkeypatch):
    from sonde.probes import readings

    taken = []
    fetch = readings.Tally._fetch
    monkeypatch.setattr(
        readings.Tally, "_fetch", lambda self, shelf: taken.append(len(shelf.arenas)) or fetch(self, shelf)
    )
    model = with_gradients(nn.Sequential(*(nn.Linear(4, 4) for _ in range(200)), nn.Linear(4, 3)))
    make().check_gradients(model)
    assert taken == [1]


def test_what_is_not_a_model_is_refused(make):
    with pytest.raises(OptionError, match="a model is needed"):
        make().check_gradients(None)
