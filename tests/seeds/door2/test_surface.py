"""Every argument, default and key that users of the documented PyTorch debugging tools rely on."""

from __future__ import annotations

import inspect
import json

import pytest
import torch
from torch import nn

from sonde.pytorch_debugging import (
    EnhancedTrainingOptimizer,
    PyTorchDebugger,
    TrainingEventType,
    TrainingLogger,
    TrainingOptions,
    create_pytorch_debugger,
    debug_training_session,
)

FLAGS = (
    "logger",
    "debug_mode",
    "enable_anomaly_detection",
    "enable_profiling",
    "enable_memory_tracking",
    "enable_gradient_checking",
    "log_dir",
)


def defaults(function):
    return {name: each.default for name, each in inspect.signature(function).parameters.items()}


@pytest.mark.parametrize(
    ("function", "values"),
    [
        (PyTorchDebugger, (None, False, False, False, False, False, "debug_logs")),
        (create_pytorch_debugger, (None, True, True, False, True, True, "debug_logs")),
        (debug_training_session, (None, True, True, False, True, True, "debug_logs")),
    ],
    ids=["class", "factory", "session"],
)
def test_flags_and_their_defaults(function, values):
    found = defaults(function)
    assert tuple(found[flag] for flag in FLAGS) == values


def test_the_training_optimizer_and_its_logger_have_the_documented_defaults():
    found = defaults(EnhancedTrainingOptimizer)
    names = ("val_loader", "log_dir", "log_level", "device", "debug_mode", "enable_pytorch_debugging")
    assert tuple(found[name] for name in names) == (None, "logs", "INFO", "auto", False, False)
    options = TrainingOptions()
    assert (options.learning_rate, options.batch_size, options.max_epochs, options.weight_decay) == (
        1e-3,
        32,
        100,
        1e-5,
    )
    assert (options.gradient_clip, options.patience, options.save_interval) == (1.0, 10, 5)
    assert str(options.checkpoint_dir) == "checkpoints"
    logger = defaults(TrainingLogger)
    assert (logger["log_dir"], logger["log_level"], logger["max_log_files"], logger["flush_interval"]) == (
        "logs",
        20,
        10,
        100,
    )
    assert len(TrainingEventType) == 15


def test_summary_report_step_and_parameters_have_the_documented_keys(tmp_path):
    torch.manual_seed(0)
    model, loss_fn = nn.Linear(4, 2), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with create_pytorch_debugger(log_dir=tmp_path) as debugger:
        with debugger.memory_tracking():
            step = debugger.debug_training_step(model, torch.randn(3, 4), torch.zeros(3, 2), loss_fn, optimizer)
        assert set(step) == {"forward_outputs", "loss", "gradient_norm", "parameter_stats"}
        ranges = step["parameter_stats"]["parameter_ranges"]
        assert set(ranges) == {"weight", "bias"}
        assert all(set(each) == {"min", "max", "mean", "std"} for each in ranges.values())
        counts = {"total_parameters", "nan_parameters", "inf_parameters", "zero_parameters"}
        assert counts <= set(step["parameter_stats"])
        summary = json.loads(json.dumps(debugger.get_debug_summary()))
        assert set(summary) == {
            *("debug_mode", "anomaly_detected", "profiler_active"),
            *("nan_detections", "inf_detections", "gradient_explosions", "gradient_vanishing"),
            *("debug_events_count", "memory_snapshots_count", "gradient_violations_count"),
            "memory_statistics",
        }
        assert {"bytes", "peak_bytes", "growth_bytes"} <= set(summary["memory_statistics"]["process"])
        report = json.loads(debugger.save_debug_report(tmp_path / "debug_report.json").read_text())
    sections = {"debug_summary", "debug_events", "memory_snapshots", "gradient_violations", "timestamp"}
    assert sections <= set(report)
    assert all(set(event) == {"timestamp", "event_type", "message", "data"} for event in report["debug_events"])
    known = {"timestamp", "cpu_memory_percent", "cpu_memory_available", "cpu_memory_used"}
    assert all(known <= set(snapshot) for snapshot in report["memory_snapshots"])


def test_an_explosion_is_reported_as_documented(tmp_path):
    model = nn.Linear(2, 1)
    (100 * model(torch.ones(1, 2))).sum().backward()
    with create_pytorch_debugger(log_dir=tmp_path) as debugger:
        norm = debugger.check_gradients(model, gradient_threshold=1.0)
        (event,) = debugger.gradient_violations
    assert event["event_type"] == "gradient_explosion"
    assert (event["data"]["gradient_norm"], event["data"]["threshold"]) == (norm, 1.0)
