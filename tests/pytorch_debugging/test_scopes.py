"""Scopes restore what they touch, never swallow, and tell what they saw."""

from __future__ import annotations

import gc
import json
import logging
import math
import warnings
from pathlib import Path

import pytest
import torch
from tests.pytorch_debugging.conftest import batch, kinds, small_model
from torch import nn

import sonde
from sonde.pytorch_debugging import debug_training_session
from sonde.testing import assert_no_taps


class Log(nn.Module):
    def forward(self, x):
        return torch.log(x - 100)  # the culprit


def train(model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("before", [(False, True), (True, True), (True, False)])
def test_anomaly_detection_restores_the_state_before_it_even_when_nested_and_raising(make, before):
    debugger = make(enable_anomaly_detection=True)
    torch.set_anomaly_enabled(*before)
    try:
        with debugger.anomaly_detection():
            assert torch.is_anomaly_enabled()
            with debugger.anomaly_detection(), torch.autograd.set_detect_anomaly(False):
                pass
            assert torch.is_anomaly_enabled()
        with pytest.raises(ZeroDivisionError), debugger.anomaly_detection():
            raise ZeroDivisionError
        with debugger.anomaly_detection():
            pass
        assert (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()) == before
    finally:
        torch.set_anomaly_enabled(False, True)
    assert_no_taps()
    assert kinds(debugger).count("anomaly_detection_start") == kinds(debugger).count("anomaly_detection_end") == 3


def test_anomaly_detection_is_off_unless_asked_for(make):
    debugger = make()
    with debugger.anomaly_detection() as scope:
        assert scope is None
        assert not torch.is_anomaly_enabled()
    with debugger.anomaly_detection(enabled=True):
        assert torch.is_anomaly_enabled()
    with make(enable_anomaly_detection=True).anomaly_detection(enabled=False):
        assert not torch.is_anomaly_enabled()


def test_a_nan_in_the_forward_pass_is_reported_with_module_and_line_and_training_goes_on(make):
    debugger = make(enable_anomaly_detection=True)
    model = nn.Sequential(nn.Linear(4, 4), Log(), nn.Linear(4, 3))
    with torch.no_grad(), debugger.anomaly_detection():
        model(batch()[0])
    assert debugger.anomaly_detected
    event = next(event for event in debugger.debug_events if event["event_type"] == "nan_forward_detected")
    assert (event["data"]["name"], event["data"]["operation"]) == ("1", "log")
    assert f"{__file__}:" in event["data"]["source"]
    assert debugger.nan_detections == 1


@pytest.mark.filterwarnings("default:Error detected in")
def test_torch_own_anomaly_error_goes_on_its_way_and_is_reported_with_the_line_of_its_forward_operation(make):
    debugger, show = make(enable_anomaly_detection=True), warnings.showwarning
    x = torch.zeros(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="returned nan values"), debugger.anomaly_detection():
        root = torch.sqrt(x)  # the culprit
        (root * 0).sum().backward()
    assert warnings.showwarning is show
    event = next(event for event in debugger.debug_events if event["event_type"] == "anomaly_detected")
    assert "returned nan values" in event["data"]["stack_trace"]
    line = next(
        number for number, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "root = torch" in text
    )
    assert event["data"]["source"].startswith(f"{__file__}:{line} in test_torch_own_anomaly")
    assert debugger.anomaly_detected


def test_an_infinite_gradient_and_what_the_optimizer_writes_are_reported(make):
    debugger, model = make(enable_anomaly_detection=True), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with debugger.anomaly_detection():
        model(torch.ones(2, 4)).sum().backward(torch.tensor(math.inf))
        optimizer.step()
    told = [kind for kind in kinds(debugger) if kind.endswith("_detected")]
    assert told == ["inf_gradient_detected", "inf_parameter_detected"]


def test_memory_tracking_lets_every_exception_through(make):
    debugger = make(enable_memory_tracking=True)
    with pytest.raises(ValueError, match="mine"), debugger.memory_tracking():
        raise ValueError("mine")
    assert kinds(debugger) == ["memory_tracking_start", "memory_tracking_end"]
    assert_no_taps()


def test_memory_snapshots_are_appended_with_the_known_keys(make):
    debugger = make(enable_memory_tracking=True)
    with debugger.memory_tracking() as scope, debugger.memory_tracking() as inner:
        assert inner is scope
        train(small_model())
    assert len(debugger.memory_snapshots) == debugger.get_debug_summary()["memory_snapshots_count"] == 2
    for snapshot in debugger.memory_snapshots:
        assert {"timestamp", "cpu_memory_percent", "cpu_memory_available", "cpu_memory_used"} <= set(snapshot)
    difference = debugger.debug_events[-1]["data"]["difference"]
    assert "rss" in difference


def leak(debugger, model):
    optimizer, kept = torch.optim.SGD(model.parameters(), 0.1), []
    with debugger.memory_tracking(max_share=100.0):  # a test has few steps, so look at each
        for step in range(60):
            model(batch(step)[0]).sum().backward()
            optimizer.step()
            kept.append(torch.ones(100_000))  # the leak


def test_a_leak_on_the_cpu_is_reported_with_its_line_and_a_healthy_program_is_not(make):
    debugger, model = make(enable_memory_tracking=True), small_model()
    with debugger.memory_tracking():
        train(model, 30)
    assert "memory_leak_detected" not in kinds(debugger)
    gc.freeze()  # what other tests left behind is not looked through, which makes looking quick
    leak(debugger, model)
    gc.unfreeze()
    event = next(event for event in debugger.debug_events if event["event_type"] == "memory_leak_detected")
    lines = Path(__file__).read_text().splitlines()
    number = next(number for number, text in enumerate(lines, 1) if "# the leak" in text and "kept" in text)
    assert any(f"test_scopes.py:{number}" in line for line in event["data"]["lines"])


def test_profiling_writes_a_trace_that_opens(make):
    debugger, model = make(enable_profiling=True), small_model()
    with debugger.profiling(output_file="profile.json"):
        assert debugger.profiler_active
        train(model)
    assert not debugger.profiler_active
    trace = json.loads(Path("profile.json").read_text())
    assert any("addmm" in event.get("name", "") for event in trace["traceEvents"])
    assert kinds(debugger) == ["profiling_start", "profiling_end"]


def test_a_long_profile_without_a_schedule_stops_and_stays_stopped(make):
    debugger, model = make(enable_profiling=True), small_model()
    with debugger.profiling(output_file="profile.json") as scope:
        train(model, 25)
    assert [path.name for path in scope.trace_files] == ["profile.json"]
    assert len(scope.notes) == 1


def test_naming_an_output_file_is_asking_for_a_profile(make):
    debugger = make()
    with debugger.profiling(output_file="profile.json"):
        small_model()(batch()[0])
    assert Path("profile.json").exists()
    with debugger.profiling() as scope:
        assert scope is None


def test_an_error_while_profiling_goes_on_and_the_profiler_stops(make):
    debugger = make(enable_profiling=True)
    with pytest.raises(KeyError), debugger.profiling(), debugger.profiling():
        raise KeyError("mine")
    assert kinds(debugger) == ["profiling_start", "profiling_error", "profiling_end"]
    with debugger.profiling():  # torch allows one at a time: the first one has ended
        small_model()(batch()[0])
    assert list(debugger.log_dir.glob("profile_*.json"))


def test_debug_training_session_watches_the_model_and_enters_what_its_flags_name(tmp_path):
    model = small_model()
    with debug_training_session(model, log_dir="logs", enable_profiling=True) as debugger:
        assert torch.is_anomaly_enabled()
        assert debugger.profiler_active
        train(model, 8)
        debugger.check_gradients(model)
    assert not torch.is_anomaly_enabled()
    assert_no_taps(model)
    assert {"anomaly_detection_end", "profiling_end", "memory_tracking_end"} <= set(kinds(debugger))
    run = sonde.open_run(debugger.run)
    assert run.series("0.weight:gradient", "norm").steps.tolist() == list(range(1, 9))
    assert run.header.model["name"] == "Sequential"
    (report,) = Path("logs").glob("debug_report_*.json")
    found = json.loads(report.read_text())
    assert found["debug_summary"]["memory_snapshots_count"] == 2
    assert list(Path("logs").glob("profile_*.json"))


def test_steps_debugged_inside_a_session_are_steps_of_its_run():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with debug_training_session(model, log_dir="logs", enable_anomaly_detection=False) as debugger:
        for step in range(3):
            debugger.debug_training_step(model, *batch(step), nn.functional.cross_entropy, optimizer)
    run = sonde.open_run(debugger.run)
    for key in ("loss:scalar", "gradient_norm:scalar", "0.weight:update"):
        assert run.series(key, "mean").steps.tolist() == [1, 2, 3], key


def test_the_report_of_a_session_names_what_was_found_wrong_with_the_model():
    model = nn.Sequential(nn.Linear(4, 4), Log(), nn.Linear(4, 3))
    with debug_training_session(model, log_dir="logs", enable_anomaly_detection=False) as debugger:
        train(model, 3)
    report = json.loads(next(Path("logs").glob("debug_report_*.json")).read_text())
    assert report["findings"] == json.loads(json.dumps([each.to_json() for each in debugger.findings]))
    first = report["findings"][0]
    assert first["sites"] == ["1"]
    assert "Findings" in debugger.save_debug_report("report.html").read_text()


@pytest.mark.filterwarnings("ignore:Error detected in")
def test_a_nan_is_reported_once_though_the_session_repeats_the_step_to_find_its_cause():
    model = nn.Sequential(nn.Linear(4, 4), Log(), nn.Linear(4, 3))
    with pytest.raises(RuntimeError, match="nan values"), debug_training_session(model, log_dir="logs") as debugger:
        train(model, 3)
    told = [event["data"] for event in debugger.debug_events if event["event_type"] == "nan_forward_detected"]
    assert [(data["name"], data["operation"]) for data in told] == [("1", "log")]


def test_debug_training_session_enters_nothing_whose_flag_is_off(tmp_path):
    flags = dict.fromkeys(("enable_anomaly_detection", "enable_memory_tracking", "enable_profiling"), False)
    with debug_training_session(small_model(), log_dir="logs", **flags) as debugger:
        assert not torch.is_anomaly_enabled()
        assert not debugger.profiler_active
    assert kinds(debugger) == []


def test_debug_training_session_saves_its_report_when_training_raises_and_lets_the_error_through():
    with pytest.raises(ZeroDivisionError), debug_training_session(small_model(), log_dir="logs") as debugger:
        raise ZeroDivisionError("mine")
    assert kinds(debugger)[-1] == "training_error"
    (report,) = Path("logs").glob("debug_report_*.json")
    assert "mine" in report.read_text()
    assert not torch.is_anomaly_enabled()


def test_training_inside_a_session_is_bit_identical():
    plain, debugged = small_model(), small_model()
    train(plain, 5)
    with debug_training_session(debugged, log_dir="logs", logger=logging.getLogger("mine")):
        train(debugged, 5)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), debugged.parameters(), strict=True))
