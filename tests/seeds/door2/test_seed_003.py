"""Every Python example of the PyTorch debugging tools runs as it stands, but for its import lines."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sonde
from sonde.pytorch_debugging import PyTorchDebugger, create_pytorch_debugger, debug_training_session
from sonde.testing import assert_no_taps

PAGE = (Path(__file__).parent / "examples.txt").read_text()
PARTS = re.split(r"^######## (.*)\n", PAGE, flags=re.M)[1:]
BLOCKS = dict(zip(PARTS[::2], PARTS[1::2], strict=True))


class Logger:
    """The training logger as the examples use it."""

    def __init__(self):
        self.said = []

    def log_info(self, message):
        self.said.append(("info", message))

    def log_warning(self, message):
        self.said.append(("warning", message))

    def log_error(self, message):
        self.said.append(("error", message))


@pytest.fixture
def space(tmp_path, monkeypatch):
    """Names that the examples take for granted."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2))
    inputs, targets = torch.randn(32, 10), torch.randint(2, (32,))
    loss_fn, stepper = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1)

    def train_epoch():
        for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            stepper.zero_grad()
            loss_fn(model(x), y).backward()
            stepper.step()

    loader = DataLoader(TensorDataset(inputs, targets), batch_size=8)
    names = {"model": model, "inputs": inputs, "targets": targets, "loss_fn": loss_fn, "logger": Logger()}
    names |= {"train_epoch": train_epoch, "train_model": train_epoch, "num_epochs": 2, "json": json, "torch": torch}
    names |= {"train_loader": loader, "val_loader": loader}
    yield names
    for value in names.values():
        if isinstance(value, PyTorchDebugger):
            value.close()
    torch.set_num_threads(threads)
    assert_no_taps(model)


def run(space, *names):
    for name in names:
        run_code(BLOCKS[name], space)


def run_code(text, space):
    code = compile(text, "example", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(code, space))
    else:
        exec(code, space)


def kinds(space):
    return [event["event_type"] for event in space["debugger"].debug_events]


def test_anomaly_detection(space):
    run(space, "anomaly")
    assert kinds(space) == ["anomaly_detection_start", "anomaly_detection_end"]
    assert space["model"][0].weight.grad is not None
    assert not torch.is_anomaly_enabled()


def test_profiling_after_the_first_example_writes_a_trace_though_its_flag_is_off(space):
    run(space, "anomaly", "profile")
    assert json.loads(Path("profile.json").read_text())["traceEvents"]


def test_memory_tracking(space):
    run(space, "anomaly", "memory")
    assert len(space["debugger"].memory_snapshots) == 2


def test_gradient_and_parameter_checks(space):
    run(space, "anomaly", "checks")
    expected = torch.cat([each.grad.flatten() for each in space["model"].parameters()]).norm()
    assert space["gradient_norm"] == pytest.approx(expected.item(), rel=1e-6)
    assert space["param_stats"]["total_parameters"] == 10 * 16 + 16 + 16 * 2 + 2


def test_forward_then_backward_debugging(space):
    forward, backward = BLOCKS["passes"].strip().split("\n\n")
    run(space, "anomaly")
    space["model"].zero_grad()
    exec(forward, space)
    space["loss"] = space["loss_fn"](space["outputs"], space["targets"])
    exec(backward, space)
    assert space["model"][0].weight.grad.abs().sum() > 0
    assert list(space["debugger"].last_forward) == ["0", "1", "2"]


def test_a_whole_training_session(space):
    run(space, "session")
    assert {"anomaly_detection_end", "profiling_end", "memory_tracking_end"} <= set(kinds(space))
    assert sonde.open_run(space["debugger"].run).series("0.weight:gradient", "norm").steps.tolist() == [1, 2, 3, 4]
    assert list(Path("debug_logs").glob("debug_report_*.json"))
    assert ("info", "Anomaly detection started") in space["logger"].said


def test_settings_summary_report_and_clearing(space, capsys):
    run(space, "anomaly", "settings", "memory", "checks", "summary", "report", "clearing")
    assert json.loads(capsys.readouterr().out)["memory_snapshots_count"] == 2
    assert json.loads(Path("debug_report.json").read_text())["debug_events"]
    assert Path("final_debug_report.json").exists()
    assert kinds(space) == []


def test_events_go_to_the_training_logger(space):
    run(space, "anomaly", "settings", "logging")
    said = len(space["logger"].said)
    space["debugger"]._log_debug_event("gradient_explosion", "too large")
    space["debugger"]._log_debug_event("nan_parameter_detected", "not a number")
    space["debugger"]._log_debug_event("anomaly_detection_start", "enabled")
    assert space["logger"].said[said:] == [("warning", "too large"), ("error", "not a number"), ("info", "enabled")]


def test_error_recovery(space):
    space["x"] = torch.tensor([1.0, math.nan, math.inf])
    run(space, "anomaly", "recovery")
    assert space["x"].tolist() == [1.0, 0.0, 0.0]
    assert space["gradient_norm"] > 0


def test_custom_error_handling(space):
    run(space, "anomaly")
    space["debugger"].clear_debug_data()
    example = BLOCKS["custom handling"].replace("        pass", "        raise ValueError('mine')")
    exec(example, space)
    assert kinds(space)[-1] == "custom_error"
    assert space["debugger"].debug_events[-1]["message"] == "mine"


def test_events_and_snapshots_look_as_shown(space):
    run(space, "anomaly", "event", "snapshot")
    debugger, shown = space["debugger"], space["debug_event"]
    debugger._log_debug_event(shown["event_type"], shown["message"], shown["data"])
    found = debugger.debug_events[-1]
    assert set(found) == set(shown)
    assert found["data"] == shown["data"]
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", found["timestamp"])
    run(space, "memory")
    wanted = {key for key in space["snapshot"] if torch.cuda.is_available() or not key.startswith("cuda")}
    assert wanted <= set(debugger.memory_snapshots[-1])


@pytest.mark.parametrize("name", ["development", "production", "performance"])
def test_scenarios(space, name):
    exec("from sonde.pytorch_debugging import create_pytorch_debugger", space)
    run(space, name)
    expected = {
        "development": {"anomaly_detection_end", "profiling_end", "memory_tracking_end"},
        "production": {"memory_tracking_end"},
        "performance": {"profiling_end"},
    }
    ended = {kind for kind in kinds(space) if kind.endswith("_end")}
    assert ended == expected[name]
    assert Path("performance_profile.json").exists() == (name == "performance")


def test_the_trace_example(space):
    run(space, "anomaly", "trace")
    assert Path("profile.json").exists()


def test_the_signatures_are_those_documented():
    def names(function):
        return [name for name in inspect.signature(function).parameters if name != "self"]

    flags = ["enable_anomaly_detection", "enable_profiling", "enable_memory_tracking", "enable_gradient_checking"]
    assert names(PyTorchDebugger.__init__)[:7] == ["logger", "debug_mode", *flags, "log_dir"]
    assert names(create_pytorch_debugger) == ["logger", "debug_mode", *flags, "log_dir"]
    assert names(debug_training_session)[:7] == ["model", "logger", "debug_mode", *flags]
    documented = {
        "anomaly_detection": ["enabled"],
        "profiling": ["enabled", "output_file"],
        "memory_tracking": ["enabled"],
        "check_gradients": ["model", "gradient_threshold"],
        "check_model_parameters": ["model"],
        "debug_forward_pass": ["model", "inputs", "layer_hooks"],
        "debug_backward_pass": ["loss", "retain_graph"],
        "debug_training_step": ["model", "inputs", "targets", "loss_fn", "optimizer", "gradient_threshold"],
        "get_debug_summary": [],
        "save_debug_report": ["filename"],
        "clear_debug_data": [],
    }
    for member, expected in documented.items():
        assert names(getattr(PyTorchDebugger, member))[: len(expected)] == expected, member


@pytest.mark.parametrize("name", ["optimizer", "optimizer settings", "integrated"])
def test_the_training_optimizer(space, name):
    exec("from sonde.pytorch_debugging import create_enhanced_training_optimizer", space)
    before = [each.detach().clone() for each in space["model"].parameters()]
    run_code(BLOCKS[name].replace("max_epochs=100", "max_epochs=2"), space)  # the same call, in a test's time
    if "await" in BLOCKS[name]:
        assert space["results"]
        assert any(not torch.equal(a, b) for a, b in zip(before, space["model"].parameters(), strict=True))
    space["optimizer"].cleanup()
