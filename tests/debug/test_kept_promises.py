"""What the documentation of debug sessions promises, each as a user would try it."""

from __future__ import annotations

import json
import logging
import math
import re

import numpy as np
import pytest
import torch
from torch import nn

import sonde
from sonde.debug import (
    DebugConfig,
    HookAction,
    HookBuilder,
    HookTrigger,
    ModelDiagnostics,
    ModelPerformanceMetrics,
    Profiler,
    TensorInspector,
    TrainingStopped,
    debug_session,
    debug_session_with_config,
    evaluate_architecture,
)
from sonde.errors import SelectionError
from sonde.testing import FakeClock, tiny_mlp


class Functional(nn.Module):
    """Uses torch.relu, which is not a module."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def train(model, steps, *, session=None, lr=0.05, spoil=None, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr)
    for step in range(1, steps + 1):
        x = torch.randn(32, 8)
        loss = nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long())
        if step == spoil:
            loss = loss * math.nan
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if session is not None:
            session.log(loss=loss)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# ---------------------------------------------------------------- dead units of a watched model


def test_dead_units_are_found_in_a_watched_model_without_handing_anything_in():
    model = tiny_mlp()
    with torch.no_grad():
        model[0].bias[:5] = -1e3
    with debug_session(model) as session:
        train(model, 12)
    (units,) = session.gradient_debugger.dead_units()
    assert (units.layer, units.units, units.num_dead, units.dead_share) == ("1", 16, 5, 5 / 16)
    assert units.samples == 12 * 32
    assert session.report.gradients["dead_units"][0]["num_dead"] == 5


def test_dead_units_after_a_function_are_found_by_their_gradients():
    model = Functional()
    with torch.no_grad():
        model.first.bias[:5] = -1e3
    with debug_session(model) as session:
        train(model, 12)
    found = {units.layer: units for units in session.gradient_debugger.dead_units()}
    assert (found["first.weight"].num_dead, found["first.weight"].measured) == (5, "gradients")
    assert found["second.weight"].num_dead == 0


def test_all_units_of_a_healthy_model_are_alive():
    model = tiny_mlp()
    with debug_session(model) as session:
        train(model, 12)
    assert [units.num_dead for units in session.gradient_debugger.dead_units()] == [0]


# ---------------------------------------------------------------- sampling, switches, layers


def test_of_what_is_handed_in_without_a_model_the_share_asked_for_is_looked_at_from_the_first_on():
    with debug_session_with_config(DebugConfig(sampling_rate=0.1)) as session:
        ids = [session.debug_tensor([float(i)], "x") for i in range(40)]
        for i in range(40):
            session.debug_gradients("fc", [1.0 + i])
    looked = [i for i, each in enumerate(ids) if session.tensor_inspector.get_tensor_info(each) is not None]
    assert looked == [0, 10, 20, 30]
    assert [point.norm for point in session.gradient_debugger.get_layer_history("fc")] == [1, 11, 21, 31]
    assert (session.report.tensors["total_inspected"], session.report.tensors["skipped"]) == (4, 36)


def test_of_what_is_handed_in_beside_a_model_the_steps_of_the_run_are_looked_at():
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with debug_session(model, optimizer, DebugConfig(sampling_rate=0.25)) as session:
        ids = []
        for _ in range(8):
            ids.append(session.debug_tensor(model[0].weight, "w"))
            train(model, 1, optimizer=optimizer)
    assert [session.tensor_inspector.get_tensor_info(each) is not None for each in ids] == [
        False,
        False,
        False,
        True,
    ] * 2


@pytest.mark.parametrize("off", ["tensor_inspection", "gradient_debugging", "model_diagnostics"])
def test_what_is_switched_off_takes_nothing_that_is_handed_in(off):
    with debug_session_with_config(DebugConfig(**{f"enable_{off}": False})) as session:
        session.debug_tensor([1.0, math.nan], "x")
        session.debug_gradients("fc", [1.0])
        session.gradient_debugger.record_activations("fc", np.ones((4, 2)))
        session.model_diagnostics.record_performance(ModelPerformanceMetrics(training_step=1, loss=math.nan))
        session.log(loss=1.0)
    taken = {
        "tensor_inspection": session.tensor_inspector.num_inspected,
        "gradient_debugging": len(session.gradient_debugger.get_layer_history("fc")),
        "model_diagnostics": len(session.model_diagnostics.get_metrics()),
    }
    assert taken.pop(off) == 0
    assert all(taken.values())
    assert bool(session.gradient_debugger.dead_units()) is (off != "gradient_debugging")


def test_only_the_layers_of_the_config_are_watched_and_taken(tmp_path):
    model = tiny_mlp()
    with debug_session(model, config=DebugConfig(layers=["2", "kind:ReLU"], output_dir=tmp_path)) as session:
        train(model, 3)
        session.debug_gradients("0.weight", [1.0])
        session.debug_gradients("2.bias", [1.0])
        session.debug_tensor([1.0], "out", layer="0")
        session.debug_tensor([1.0], "out", layer="1")
        session.debug_tensor([1.0], "of no layer")
    run = sonde.open_run(session.report.run)
    assert {site.name for site in run.sites if site.quantity == "gradient"} == {"2.weight", "2.bias"}
    assert {site.name for site in run.sites if site.quantity == "output" and site.name in "012"} == {"1", "2"}
    assert not session.gradient_debugger.get_layer_history("0.weight")
    assert len(session.gradient_debugger.get_layer_history("2.bias")) == 4
    assert [info.layer for info in session.tensor_inspector.get_all_tensors()] == ["1", None]


@pytest.mark.parametrize("kept", [False, True])
def test_layers_that_do_not_exist_are_an_error_with_the_nearest(tmp_path, kept):
    config = DebugConfig(layers="2.weigth", output_dir=tmp_path if kept else None)
    with pytest.raises(SelectionError, match="nearest: 2"):
        debug_session(tiny_mlp(), config=config).start()
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    with pytest.raises(SelectionError, match="not a regular expression"):
        DebugConfig(layers="re:(")


# ---------------------------------------------------------------- clear


def test_clear_frees_what_is_remembered_and_the_session_goes_on(tmp_path):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with debug_session(model, optimizer, DebugConfig(output_dir=tmp_path)) as session:
        hook = HookBuilder("h").trigger(HookTrigger.EveryForward).action(HookAction.InspectTensor)
        session.hooks.register(hook.layer_patterns(["0"]).build())
        train(model, 5, optimizer=optimizer, session=session)
        session.debug_tensor([math.nan], "bad")
        session.profiler.record_time("mine", 1.0)
        session.snapshot()
        assert session.alerts
        session.clear()
        assert not session.tensor_inspector.get_all_tensors()
        assert not session.tensor_inspector.get_alerts()
        assert not session.gradient_debugger.get_layer_history("0.weight")
        assert not session.model_diagnostics.get_metrics()
        assert "mine" not in session.profiler.get_statistics()
        assert not session.alerts
        train(model, 4, optimizer=optimizer, session=session)
    steps = [point.step for point in session.gradient_debugger.get_layer_history("0.weight")]
    assert steps == [6, 7, 8, 9]
    assert session.report.steps == 9
    assert session.model_diagnostics.architecture is not None
    assert len(sonde.open_run(session.report.run).series("0.weight:gradient", "norm").steps) == 9


# ---------------------------------------------------------------- alerts as they happen


def test_alerts_of_what_is_handed_in_reach_the_listener_and_the_log_at_once(caplog, tmp_path):
    heard = []
    with debug_session_with_config(DebugConfig(output_dir=tmp_path)) as session:
        session.on_alert(heard.append)
        session.debug_tensor([math.nan], "x", layer="fc")
        assert [(alert["source"], alert["kind"], alert["severity"]) for alert in heard] == [
            ("tensor", "nan", "critical")
        ]
        assert "x in fc: 1 of 1 elements are NaN" in caplog.text
        for _ in range(20):
            session.debug_gradients("fc", [1.0])
        session.debug_gradients("fc", [1e6])
        assert (heard[-1]["source"], heard[-1]["kind"], heard[-1]["layer"]) == ("gradient", "exploding", "fc")
        session.log(loss=math.nan)
        assert (heard[-1]["source"], heard[-1]["kind"]) == ("diagnostics", "nan_loss")
        assert heard[-1]["message"] == "the loss is NaN at this step only"
        assert list(session.alerts) == heard
    noted = [event.message for event in sonde.open_run(session.report.run).events if event.event_type == "alert"]
    assert noted == [alert["message"] for alert in heard]


def test_findings_on_a_watched_model_reach_the_listener_and_the_log_while_it_trains(caplog):
    model, heard = tiny_mlp(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with debug_session(model, optimizer) as session:
        session.on_alert(lambda alert: heard.append((session.step, alert)))
        train(model, 12, optimizer=optimizer, spoil=5)
        session.snapshot()
        train(model, 1, optimizer=optimizer)
        step, alert = heard[0]
        assert step <= 13, "before the session has stopped"
        assert (alert["source"], alert["severity"]) == ("finding", "critical")
        assert alert["message"] in caplog.text
    kinds = [alert["kind"] for _, alert in heard]
    assert len(kinds) == len(set(kinds)), "each once"


def test_a_listener_may_stop_the_training_and_a_failing_one_is_reported_once(caplog):
    def stop(alert):
        raise TrainingStopped("enough")

    def fail(alert):
        raise ZeroDivisionError("planted")

    with debug_session() as session:
        session.on_alert(fail)
        session.debug_tensor([math.nan], "x")
        session.debug_tensor([math.nan], "x")
        assert caplog.text.count("a listener of alerts failed") == 1
        session.on_alert(stop)
        session.debug_tensor([math.nan], "x")
        pytest.fail("the training went on")
    assert session.report is not None


# ---------------------------------------------------------------- degradation


def metrics(diagnostics, steps, **curves):
    for step in range(steps):
        numbers = {name: float(values[step]) for name, values in curves.items()}
        diagnostics.record_performance(ModelPerformanceMetrics(training_step=step, **numbers))
    return [alert.kind for alert in diagnostics.get_alerts()]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("throughput_samples_per_sec", "throughput_degradation"),
        ("gpu_utilization", "low_device_use"),
        ("accuracy", "performance_degradation"),
    ],
)
def test_a_metric_that_falls_and_stays_low_is_reported_and_its_noise_is_not(name, kind):
    rng = np.random.default_rng(0)
    level = 0.9 * (1 + 0.02 * rng.standard_normal(60))
    losses = np.exp(-np.arange(60) / 40)
    assert metrics(ModelDiagnostics(), 60, loss=losses, **{name: level}) == []
    fallen = level * np.where(np.arange(60) < 40, 1.0, 0.6)
    diagnostics = ModelDiagnostics()
    assert metrics(diagnostics, 60, loss=losses, **{name: fallen}) == [kind]
    (alert,) = diagnostics.get_alerts()
    assert 41 <= alert.step <= 44
    assert "over the last 5 values only" in alert.message
    assert alert.fix


@pytest.mark.parametrize("watched", [False, True])
def test_an_accuracy_that_is_logged_and_falls_is_reported_at_once(watched):
    model = tiny_mlp() if watched else None
    with debug_session(model) as session:
        for step in range(30):
            session.log(accuracy=0.9 if step < 20 else 0.5)
        assert [alert["kind"] for alert in session.alerts] == ["performance_degradation"]


def test_a_loss_that_leaps_is_reported_at_its_step_and_one_that_falls_is_not():
    losses = 1 + np.exp(-np.arange(60) / 20) + 0.02 * np.random.default_rng(0).standard_normal(60)
    assert metrics(ModelDiagnostics(), 60, loss=losses) == []
    losses[45] = 30.0
    diagnostics = ModelDiagnostics()
    assert metrics(diagnostics, 60, loss=losses) == ["loss_spike"]
    assert diagnostics.get_alerts()[0].step == 45
    assert "at this step only" in diagnostics.get_alerts()[0].message


@pytest.mark.parametrize(
    ("loss", "kind", "word"), [(math.nan, "nan_loss", "NaN"), (math.inf, "infinite_loss", "infinite")]
)
def test_a_loss_that_is_nan_is_called_nan(loss, kind, word):
    diagnostics = ModelDiagnostics()
    assert metrics(diagnostics, 31, loss=[*np.linspace(2, 1, 30), loss]) == [kind]
    assert f"the loss is {word}" in diagnostics.get_alerts()[0].message
    dynamics = diagnostics.analyze_training_dynamics()
    assert dynamics.convergence_status == "non-finite"
    assert any(f"The loss is {word}" in text for text in dynamics.recommendations)
    assert diagnostics.assess_health().status == "critical"


def test_a_nan_loss_of_a_watched_model_is_called_nan():
    model = tiny_mlp()
    with debug_session(model) as session:
        train(model, 8, session=session, spoil=6)
    assert session.model_diagnostics.analyze_training_dynamics().convergence_status == "non-finite"
    assert session.model_diagnostics.assess_health().status == "critical"
    assert session.report.summary().critical_issues >= 1
    assert any("NaN" in issue for issue in session.report.summary().issues)


# ---------------------------------------------------------------- architecture


def test_dead_redundant_and_low_rank_weights_are_found_with_what_they_cost():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    with torch.no_grad():
        model[0].weight[:8] = 0
        model[2].weight[1] = 3 * model[2].weight[0]
        model[4].weight.copy_(torch.randn(64, 4) @ torch.randn(4, 64))
    found = evaluate_architecture(model)
    by_name = {use.name: use for use in found.weights}
    assert (by_name["0.weight"].dead_units, by_name["2.weight"].redundant_units) == (8, 1)
    assert (found.dead_parameters, found.redundant_parameters) == (8 * 64, 64)
    assert found.bottleneck == "4.weight"
    assert by_name["4.weight"].effective_rank == pytest.approx(4, abs=0.5)
    assert by_name["4.weight"].needed == 4 * (64 + 64)
    assert found.parameter_efficiency == pytest.approx((56 * 64 + 63 * 64 + 4 * 128) / (3 * 64 * 64))
    assert any("8 of 64 units of 0.weight are dead" in text and "512 parameters" in text for text in found.suggestions)
    assert any(
        "spans about 4 of 64 directions" in text and "512 instead of 4,096" in text for text in found.suggestions
    )


@pytest.mark.parametrize("shape", [(64, 64), (10, 64), (64, 784), (300, 300), (512, 64)])
def test_a_fresh_layer_of_any_shape_uses_all_its_parameters(shape):
    found = evaluate_architecture(nn.Linear(shape[1], shape[0]))
    assert (found.parameter_efficiency, found.suggestions) == (1.0, ())


def test_the_report_evaluates_the_architecture_and_the_model_stays_as_it_was():
    model = tiny_mlp()
    with torch.no_grad():
        model[0].weight[:4] = 0
        model[0].bias[:4] = -1
    with debug_session(model) as session:
        train(model, 3)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    evaluation = session.report.diagnostics["architecture_evaluation"]
    assert evaluation["dead_parameters"] == 4 * 8
    assert any("4 of 16 units of 0.weight are dead" in text for text in session.report.recommendations)


# ---------------------------------------------------------------- suggestions


def test_a_suggestion_names_what_was_measured_and_what_can_be_gained():
    profiler = Profiler(FakeClock(0.0))
    for name, seconds in {"a": 0.01, "b": 0.01, "c": 0.08}.items():
        profiler.record_layer_execution(name, "Linear", seconds)
    (found,) = profiler.analyze_performance()
    assert found.gain == pytest.approx(0.7)
    assert "It takes 80 of 100 ms, 8.0 times the median layer." in found.suggestion
    assert "would take 30 instead of 100 ms: at most 3.3 times as fast" in found.suggestion


def test_a_loop_that_waits_for_data_is_suggested_to_load_ahead_with_the_gain():
    profiler = Profiler(FakeClock(0.0))
    for _ in range(40):
        for name, seconds in {"step": 0.1, "data_wait": 0.06, "forward": 0.02, "backward": 0.02}.items():
            profiler.record_time(name, seconds)
    (found,) = profiler.analyze_performance()
    assert (found.kind, found.name, found.gain) == ("phase", "data_wait", pytest.approx(0.6))
    assert "60% of the step waits for data" in found.suggestion
    assert "A step would take 40 instead of 100 ms: at most 2.5 times as fast" in found.suggestion


def test_few_or_tiny_steps_say_nothing_about_where_time_goes():
    for steps, scale in ((5, 1.0), (40, 0.001)):
        profiler = Profiler(FakeClock(0.0))
        for _ in range(steps):
            for name, seconds in {"step": 0.1, "data_wait": 0.06, "other": 0.04}.items():
                profiler.record_time(name, seconds * scale)
        assert profiler.analyze_performance() == []


# ---------------------------------------------------------------- dashboard


def test_the_dashboard_of_a_session_without_a_model_draws_loss_accuracy_tensors_and_gradients(tmp_path):
    with debug_session_with_config(DebugConfig(output_dir=tmp_path, enable_visualization=True)) as session:
        for step in range(10):
            session.model_diagnostics.record_performance(
                ModelPerformanceMetrics(training_step=step, loss=2.0 - 0.1 * step, accuracy=0.05 * step)
            )
            session.debug_tensor(np.random.default_rng(step).standard_normal(100), "scores")
            session.debug_gradients("fc", [0.1, 0.2])
    page = (session.folder / "dashboard.html").read_text(encoding="utf-8")
    drawn = json.loads(re.search(r'id="figures">(.*?)</script>', page, re.S).group(1))["figures"]
    named = {trace.get("name") for figure in drawn for trace in figure["data"]}
    assert {"loss", "accuracy", "fc"} <= named
    assert any("scores" in json.dumps(figure["layout"]) for figure in drawn)


# ---------------------------------------------------------------- leaks of inspected tensors


def test_tensors_that_the_program_keeps_are_found_by_name_and_those_it_drops_are_not():
    inspector, kept = TensorInspector(), []
    for _ in range(30):
        output = torch.zeros(1000)
        inspector.inspect_tensor(output, "kept")
        kept.append(output)
        inspector.inspect_tensor(torch.zeros(1000), "dropped")
    (alert,) = inspector.get_alerts()
    assert (alert.kind, alert.name, alert.severity) == ("leak", "kept", "warning")
    assert inspector.live_tensors() == {"kept": {"count": 30, "bytes": 30 * 4000}}
    del output
    kept.clear()
    assert inspector.live_tensors() == {}


def test_one_weight_that_is_inspected_again_and_again_is_not_a_leak():
    inspector, weight = TensorInspector(), torch.zeros(10)
    for _ in range(30):
        inspector.inspect_tensor(weight, "weight")
    assert inspector.get_alerts() == []
    assert inspector.live_tensors() == {"weight": {"count": 1, "bytes": 40}}


def test_a_quiet_session_logs_nothing(caplog):
    model = tiny_mlp()
    with caplog.at_level(logging.WARNING, "sonde"), debug_session(model) as session:
        train(model, 30, session=session, lr=0.5)
    assert not session.alerts, session.alerts
    assert not caplog.records
