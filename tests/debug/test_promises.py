"""The promises that older tools of this kind made in their documents and broke: one test for each, named after it."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
import torch
from torch import nn

from sonde.debug import (
    DebugConfig,
    DebugVisualizer,
    GradientDebugger,
    HookAction,
    HookBuilder,
    HookCondition,
    HookTrigger,
    ModelDiagnostics,
    ModelPerformanceMetrics,
    TensorInspector,
    TerminalVisualizer,
    VisualizationConfig,
    analyze_attention,
    analyze_weights,
    debug_session,
)
from sonde.testing import tiny_mlp


@pytest.fixture
def parts():
    torch.manual_seed(0)
    model = tiny_mlp()
    return model, torch.optim.SGD(model.parameters(), 0.05)


def train(model, optimizer, steps, session=None):
    for _ in range(steps):
        x = torch.randn(16, 8)
        loss = nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if session is not None:
            session.log(loss=loss)


def metrics(losses, validation=None):
    diagnostics = ModelDiagnostics()
    for step, loss in enumerate(losses):
        held = None if validation is None else float(validation[step])
        diagnostics.record_performance(
            ModelPerformanceMetrics(training_step=step, loss=float(loss), validation_loss=held)
        )
    return diagnostics


def test_the_documented_calls_are_the_real_ones(tmp_path):
    DebugConfig(
        enable_tensor_inspection=True,
        enable_gradient_debugging=True,
        enable_model_diagnostics=True,
        enable_visualization=False,
        max_tracked_tensors=10,
        max_gradient_history=5,
        output_dir=tmp_path,
        sampling_rate=0.5,
    )
    debugger = GradientDebugger()
    debugger.record_gradient_flow("layer1", [0.1, 0.2])
    assert debugger.analyze_gradient_flow().layers
    assert len(TerminalVisualizer(80, 24).ascii_line_plot([0, 1, 2], [3.0, 2.0, 1.0], "loss").splitlines()) <= 24


def test_the_visualizer_draws(tmp_path):
    visualizer = DebugVisualizer(VisualizationConfig(output_directory=str(tmp_path)))
    figure = visualizer.plot_gradient_flow("a", [0, 1, 2], [0.3, 0.2, 0.1])
    assert list(figure.data[0].y) == [0.3, 0.2, 0.1]
    assert visualizer.get_plot_names() == ["a_gradient_flow"]
    page = visualizer.create_dashboard(["a_gradient_flow"]).read_text()
    drawn = json.loads(re.search(r'id="figures">(.*?)</script>', page, re.S).group(1))["figures"]
    assert [figure["data"][0]["type"] for figure in drawn] == ["scatter"]
    exported = visualizer.export_plot_data("a_gradient_flow", tmp_path / "flow.json")
    assert "0.3" in exported.read_text()


def test_hooks_act(parts):
    model, optimizer = parts
    with debug_session(model, optimizer) as session:
        for action in (HookAction.InspectTensor, HookAction.RecordActivations):
            hook = HookBuilder("h").trigger(HookTrigger.EveryForward).action(action).layer_patterns(["1"])
            session.hooks.register(hook.build())
        tracking = HookBuilder("t").trigger(HookTrigger.EveryBackward).action(HookAction.TrackGradients)
        session.hooks.register(tracking.layer_patterns(["1"]).build())
        train(model, optimizer, 8)
    assert len(session.tensor_inspector.get_tensors_by_layer("1")) == 8
    assert session.gradient_debugger.dead_units()[0].layer == "1"
    assert len(session.gradient_debugger.get_layer_history("1")) == 8


@pytest.mark.parametrize(
    "condition",
    [
        HookCondition.LossThreshold(1e9),
        HookCondition.GradientNormThreshold(1e9),
        HookCondition.MemoryThreshold(1e9),
        HookCondition.StepRange(1000, 2000),
        HookCondition.NonFinite(),
    ],
    ids=lambda condition: condition.text,
)
def test_a_condition_that_is_false_does_not_fire(parts, condition):
    model, optimizer = parts
    fired = []
    with debug_session(model, optimizer) as session:
        hook = HookBuilder("h").trigger(HookTrigger.Conditional(condition))
        session.hooks.register(hook.action(HookAction.CustomCallback(fired.append)).build())
        train(model, optimizer, 3, session)
    assert not fired


def test_dead_neurons_are_counted_from_activations(parts):
    debugger = GradientDebugger()
    for _ in range(20):
        debugger.record_gradient_flow("relu", [1e-9] * 4)  # a tiny gradient kills nobody
        debugger.record_activations("relu", np.tile([1.0, 0.0, 2.0, 3.0], (16, 1)))
    assert debugger.dead_units()[0].dead == (1,)


def test_compare_tensors_sees_the_tensors():
    inspector = TensorInspector()
    one = inspector.inspect_tensor([1.0, -1.0, 1.0, -1.0], "one")
    two = inspector.inspect_tensor([-1.0, 1.0, -1.0, 1.0], "two")  # the same mean
    found = inspector.compare_tensors(one, two)
    assert (found.mse, found.correlation) == (4.0, pytest.approx(-1.0))


def test_tracking_goes_on_after_the_limit_and_everything_is_bounded():
    inspector = TensorInspector(max_tracked_tensors=10)
    for index in range(2500):
        inspector.inspect_tensor([float("nan"), float(index)], f"tensor {index}")
    names = [info.name for info in inspector.get_all_tensors()]
    assert names == [f"tensor {index}" for index in range(2490, 2500)]
    assert len(inspector.get_alerts()) <= 1000


def test_a_time_series_has_a_point_for_each_look_and_drift_is_seen():
    inspector = TensorInspector()
    for index in range(20):
        inspector.inspect_tensor(np.full(8, 1.0 if index < 10 else 5.0) + np.linspace(0, 0.1, 8), "x")
    assert len(inspector.get_time_series("x")) == 20
    assert inspector.drift("x") is not None


def test_an_all_nan_tensor_is_described():
    inspector = TensorInspector()
    info = inspector.get_tensor_info(inspector.inspect_tensor([float("nan")] * 4, "bad"))
    assert info.stats.nan_count == 4


def test_the_health_score_is_not_a_constant():
    steps = np.arange(60)
    good = metrics(np.exp(-steps / 20)).assess_health().score
    bad = metrics(np.exp(steps / 20)).assess_health().score
    assert good == 1.0 > bad


def test_a_falling_loss_is_converging_and_a_rising_one_diverging():
    steps = np.arange(60)
    assert metrics(np.exp(-steps / 20)).analyze_training_dynamics().convergence_status == "converging"
    assert metrics(np.exp(steps / 20)).analyze_training_dynamics().convergence_status == "diverging"


def test_overfitting_needs_validation_data():
    falling = np.exp(-np.arange(60) / 20)
    assert metrics(falling).analyze_training_dynamics().fit == "unknown"
    assert metrics(falling, 1 + np.arange(60) / 10).analyze_training_dynamics().fit == "overfitting"


def test_weights_and_attention_are_measured_and_not_random():
    weight = np.random.default_rng(0).normal(size=(6, 5))
    assert analyze_weights(weight) == analyze_weights(weight.copy())
    assert analyze_weights(weight).mean == pytest.approx(weight.mean())
    uniform = np.full((1, 4, 4), 0.25)
    assert analyze_attention(uniform).heads[0].entropy == pytest.approx(1.0)


def test_the_profiler_of_a_session_knows_memory(parts):
    model, optimizer = parts
    with debug_session(model, optimizer) as session:
        train(model, optimizer, 12)
    performance = session.report.performance
    assert performance["memory_mb"]
    assert min(performance["memory_mb"]) > 10
    assert {"step", "forward", "backward", "optimizer"} <= set(performance["timers"])
    assert all(timer["total"] > 0 for timer in performance["timers"].values())


def test_max_gradient_history_output_dir_and_sampling_rate_are_obeyed(parts, tmp_path):
    model, optimizer = parts
    config = DebugConfig(max_gradient_history=3, output_dir=tmp_path, sampling_rate=0.25)
    with debug_session(model, optimizer, config) as session:
        train(model, optimizer, 24)
    assert len(session.gradient_debugger.get_layer_history("0.weight")) == 3
    assert (session.folder / "run.json").is_file()
    assert tmp_path in session.folder.parents
    steps = [point.step for point in session.gradient_debugger.get_layer_history("0.weight")]
    assert np.diff(steps).tolist() == [4, 4]


def test_a_nan_norm_is_never_healthy_and_bends_no_threshold():
    debugger = GradientDebugger()
    for step in range(30):
        debugger.record_gradient_flow("a", [float("nan") if step == 15 else 1.0])
    assert debugger.get_layer_alerts("a")[0].kind == "nonfinite"
    debugger.record_gradient_flow("a", [1e9])
    assert debugger.get_layer_alerts("a")[-1].kind == "exploding"
    debugger.record_gradient_flow("a", [float("nan")])
    (layer,) = debugger.analyze_gradient_flow().layers
    assert layer.health == "critical"


def test_critical_issues_are_counted():
    session = debug_session().start()
    for step in range(30):
        session.gradient_debugger.record_gradient_flow("a", [1e9 if step == 29 else 1.0])
        session.gradient_debugger.record_gradient_flow("b", [math.nan if step == 29 else 1.0])
    summary = session.stop().summary()
    assert summary.critical_issues >= 1
    assert any("exploding" in issue for issue in summary.issues)
    assert summary.recommendations


def test_the_health_status_has_no_holes_and_a_critical_finding_is_never_healthy():
    for height in np.linspace(0, 3, 20):
        losses = np.exp(-np.arange(60) / 20) + height * (np.arange(60) % 2)
        for broken in (False, True):
            found = metrics([*losses, math.nan] if broken else losses).assess_health()
            assert found.status in (("critical",) if broken else ("healthy", "warning", "critical"))
            assert 0 <= found.score <= 1


def test_reports_are_strict_json(parts, tmp_path):
    model, optimizer = parts
    with debug_session(model, optimizer) as session:
        session.tensor_inspector.inspect_tensor([float("nan")], "bad")
        path = session.export(tmp_path / "export.json")

    def refuse(token):
        raise AssertionError(token)

    json.loads(path.read_text(), parse_constant=refuse)
