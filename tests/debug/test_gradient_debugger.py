"""The gradient debugger: problems are judged by a layer's own past, health can be explained, cosines are true."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from sonde.debug.architecture import loss_gradients
from sonde.debug.gradient_debugger import GradientDebugger
from sonde.debug.gradient_layer import SEED
from sonde.errors import OptionError


def healthy_norms(seed, n=60, level=0.01):
    return level * np.exp(0.3 * np.random.default_rng(seed).standard_normal(n))


def debugger_with(norms, layer="fc", **options):
    debugger = GradientDebugger(**options)
    for step, norm in enumerate(norms):
        debugger.record_gradient_flow(layer, float(norm), 0.0, 1.0, step=step)
    return debugger


def problems(debugger):
    return {layer.layer: layer.problems for layer in debugger.analyze_gradient_flow().layers}


@pytest.mark.parametrize("level", [1e-9, 1e-3, 1e3])
@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_layer_is_healthy_at_any_scale(level, seed):
    debugger = debugger_with(healthy_norms(seed, level=level))
    assert problems(debugger) == {"fc": ()}
    assert debugger.analyze_gradient_flow().overall_health == "healthy"
    assert debugger.get_alerts() == []


def test_a_jump_far_above_the_layers_past_is_an_explosion():
    debugger = debugger_with([*healthy_norms(0), 5.0])
    assert problems(debugger) == {"fc": ("exploding",)}
    (alert,) = debugger.get_alerts()
    assert alert.step == 60
    assert "norm is 5, " in alert.message
    assert "at this step only" in alert.message


def test_a_fall_far_below_the_layers_past_that_lasts_is_vanishing():
    assert problems(debugger_with([*healthy_norms(0), *[1e-9] * 3])) == {"fc": ("vanishing",)}


def test_a_gradient_that_passes_through_zero_while_it_changes_its_sign_has_not_vanished():
    debugger = debugger_with([*healthy_norms(0), 1e-9, 1e-6, *healthy_norms(1, 20), 1e-9])
    assert problems(debugger) == {"fc": ()}
    assert debugger.get_alerts() == []


def test_one_nan_does_not_bend_the_thresholds():
    debugger = debugger_with([*healthy_norms(0, 30), math.nan, *healthy_norms(1, 5)])
    assert problems(debugger) == {"fc": ("nonfinite",)}, "the doctor has not forgotten it"
    assert [alert.kind for alert in debugger.get_alerts()] == ["nonfinite"]


def test_a_nan_gradient_is_critical_and_not_healthy():
    debugger = GradientDebugger()
    debugger.record_gradient_flow("fc", [0.1, math.nan])
    analysis = debugger.analyze_gradient_flow()
    assert (analysis.overall_health, analysis.having("nonfinite")) == ("critical", ["fc"])


def test_ten_steps_of_zeros_or_of_nothing_are_no_gradient():
    silent = debugger_with([0.0] * 10)
    assert problems(silent) == {"fc": ("no_gradient",)}
    absent = debugger_with(healthy_norms(0, 5))
    for step in range(5, 20):
        absent.record_gradient_flow("other", 0.1, 0.0, 1.0, step=step)
    assert problems(absent)["fc"] == ("no_gradient",)


def test_a_regular_swing_is_an_oscillation():
    swing = 1.0 + 0.8 * np.where(np.arange(60) % 2, 1, -1)
    assert problems(debugger_with(swing)) == {"fc": ("oscillating",)}


def test_fixed_bounds_of_older_tools_can_be_asked_for():
    assert problems(debugger_with([0.1] * 20 + [11.0], thresholds=SEED)) == {"fc": ("exploding",)}
    assert problems(debugger_with([1e-8] * 20, thresholds=SEED)) == {"fc": ("vanishing",)}


def test_values_give_norm_mean_and_deviation():
    debugger = GradientDebugger()
    values = np.random.default_rng(0).standard_normal(500)
    debugger.record_gradient_flow("fc", torch.tensor(values))
    (point,) = debugger.get_layer_history("fc")
    assert point.norm == pytest.approx(np.linalg.norm(values))
    assert point.mean == pytest.approx(values.mean())
    assert point.std == pytest.approx(values.std(ddof=1))


def test_recording_a_layer_again_is_the_next_step():
    debugger = GradientDebugger()
    for _ in range(3):
        for layer in ("a", "b"):
            debugger.record_gradient_flow(layer, [1.0])
    assert [point.step for point in debugger.get_layer_history("b")] == [0, 1, 2]


def test_a_step_that_is_recorded_late_goes_to_its_place_and_one_recorded_twice_counts_once():
    debugger = GradientDebugger(max_history=4)
    for step, norm in [(1, 1.0), (2, 2.0), (4, 4.0), (3, 3.0), (2, 9.0), (5, 5.0)]:
        debugger.record_gradient_flow("fc", norm, step=step)
    assert [(point.step, point.norm) for point in debugger.get_layer_history("fc")] == [(2, 2), (3, 3), (4, 4), (5, 5)]


def test_a_norm_without_a_mean_has_no_mean():
    debugger = GradientDebugger()
    debugger.record_gradient_flow("fc", 0.5)
    assert debugger.get_layer_history("fc")[0].mean is None


def test_a_negative_norm_is_refused_with_what_was_probably_meant():
    with pytest.raises(OptionError, match=r"'fc' has a norm of -1; .*as a list or a tensor"):
        GradientDebugger().record_gradient_flow("fc", -1.0)


def test_history_is_bounded():
    debugger = debugger_with(healthy_norms(0, 500), max_history=50)
    assert len(debugger.get_layer_history("fc")) == 50


def test_parts_are_shares_of_layers_and_a_jump_of_one_step_is_a_warning():
    debugger = debugger_with([*healthy_norms(0), 5.0], layer="bad")
    for step, norm in enumerate(healthy_norms(1, 61)):
        debugger.record_gradient_flow("good", float(norm), 0.0, 1.0, step=step)
    analysis = debugger.analyze_gradient_flow()
    assert analysis.parts == dict.fromkeys(analysis.parts, 1.0) | {"exploding": 0.5}
    assert (analysis.overall_health, analysis.findings) == ("warning", ()), "the doctor waits until it lasts"
    assert "Exploding in bad. Lower the learning rate" in analysis.recommendations[0]


def test_nothing_recorded_is_unknown_not_healthy():
    analysis = GradientDebugger().analyze_gradient_flow()
    assert (analysis.overall_health, analysis.score) == ("unknown", None)


def test_dead_units_come_from_activations_not_from_norms():
    debugger = GradientDebugger()
    for seed in range(10):
        torch.manual_seed(seed)
        activations = torch.relu(torch.randn(32, 8, 4, 4))
        activations[:, [2, 5]] = 0
        debugger.record_activations("relu", activations)
    (units,) = debugger.dead_units()
    assert (units.dead, units.units, units.samples) == ((2, 5), 8, 320)
    assert (units.num_dead, units.dead_share) == (2, 0.25)
    assert debugger.generate_recommendations() == [], "the doctor has no objection to a quarter"


def test_a_layer_that_is_dead_is_found_from_its_activations():
    debugger = GradientDebugger()
    for _ in range(10):
        debugger.record_activations("relu", np.tile([0.0] * 19 + [1.0], (64, 1)))
    assert "after relu are dead: 95%" in debugger.generate_recommendations()[0]


def test_a_sparse_unit_that_fires_now_and_then_is_alive():
    debugger = GradientDebugger()
    for batch in range(15):
        activations = np.zeros((10, 4))
        activations[batch % 10, batch % 4] = 1.0
        debugger.record_activations("relu", activations)
    assert debugger.dead_units()[0].dead == ()


def test_conflicts_are_true_cosines_between_losses():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    out = model(torch.randn(8, 4))
    gradients = loss_gradients(model, {"up": out.sum(), "down": -out.sum(), "other": (out[:, 0] ** 2).sum()})
    found = GradientDebugger().analyze_gradient_conflicts(gradients)
    first = next(item for item in found if (item.first, item.second) == ("up", "down"))
    assert first.cosine == pytest.approx(-1.0)
    assert first.conflicting
    assert all(parameter.grad is None for parameter in model.parameters())
    expected = torch.cosine_similarity(gradients["up"], gradients["other"], dim=0)
    assert next(i for i in found if i.second == "other" and i.first == "up").cosine == pytest.approx(
        float(expected), abs=1e-5
    )


def test_gradients_of_different_sizes_are_an_error():
    with pytest.raises(OptionError, match="2 and 3 elements"):
        GradientDebugger().analyze_gradient_conflicts({"a": [1.0, 2.0], "b": [1.0, 2.0, 3.0]})


def test_reports_hold_everything():
    debugger = debugger_with([*healthy_norms(0), 5.0])
    assert debugger.get_status()["overall_health"] == "warning"
    assert debugger.quick_analysis()["exploding"] == ["fc"]
    report = debugger.generate_comprehensive_report()
    assert len(report["history"]["fc"]) == 61
    assert debugger.generate_enhanced_layer_analysis()[0]["problems"] == ("exploding",)
    debugger.reset()
    assert debugger.get_status()["layers"] == 0


def test_gradients_that_shrink_while_a_model_learns_have_not_vanished():
    debugger = GradientDebugger()
    for step in range(60):
        debugger.record_gradient_flow("layer", [0.93**step])
    assert not debugger.get_layer_alerts("layer")
