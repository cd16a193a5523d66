"""A training session checks every step of a plain loop by itself; nothing in the loop calls the debugger."""

from __future__ import annotations

import ctypes
import json
import math
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from tests.pytorch_debugging.conftest import batch, kinds, small_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from sonde.pytorch_debugging import debug_training_session

STEPS = 30
PROFILED = 8
"""Steps where a profiler records each: what is asked of them does not need more."""
QUIET = {"enable_anomaly_detection": False, "enable_memory_tracking": False}


class Logger:
    def __init__(self):
        self.said = []

    def log_info(self, message):
        self.said.append(("info", message))

    def log_warning(self, message):
        self.said.append(("warning", message))

    def log_error(self, message):
        self.said.append(("error", message))


def train(model, *, steps=STEPS, factors=None, bad_input=None, optimizer=None, after=lambda step: None, clip=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.01)
    for step in range(1, steps + 1):
        x, y = batch(step)
        x = x * math.nan if step == bad_input else x
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y) * (factors or {}).get(step, 1.0)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        after(step)


def saved():
    (path,) = Path("logs").glob("debug_report_*.json")
    return json.loads(path.read_text())


def test_an_explosion_in_a_plain_loop_arrives_everywhere():
    model, logger = small_model(), Logger()
    with debug_training_session(model, logger, log_dir="logs", **QUIET) as debugger:
        train(model, factors={25: 1e4})
    assert debugger.gradient_explosions == 1
    (entry,) = debugger.gradient_violations
    assert (entry["event_type"], entry["data"]["step"]) == ("gradient_explosion", 25)
    assert [level for level, message in logger.said if message.startswith("Step 25: ")] == ["warning"]
    report = saved()
    assert report["debug_summary"]["gradient_explosions"] == report["debug_summary"]["gradient_violations_count"] == 1
    assert report["gradient_violations"] == [entry]
    norms = report["performance"]["gradient_norm"]
    assert (norms["count"], norms["max"]) == (STEPS, entry["data"]["gradient_norm"])
    assert {"loss", "forward_seconds", "backward_seconds"} <= set(report["performance"])
    assert set(report["gradients"]["by_name"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert report["parameters"]["total_parameters"] == 67


def test_a_nan_in_a_plain_loop_arrives_everywhere_and_is_called_nan():
    model, logger = small_model(), Logger()
    with debug_training_session(model, logger, log_dir="logs", **QUIET) as debugger:
        train(model, bad_input=25)
    first = {
        event["event_type"]: event["data"]["step"]
        for event in reversed(debugger.debug_events)
        if "nan_" in event["event_type"]
    }
    assert first == {"nan_loss_detected": 25, "nan_gradient_detected": 25, "nan_parameter_detected": 25}
    assert ("error", "Step 25: The loss is NaN") in logger.said
    assert any(level == "error" and "NaN in 4 parameters" in message for level, message in logger.said)
    report = saved()
    assert report["debug_summary"]["anomaly_detected"] is True
    assert report["debug_summary"]["nan_detections"] == 6 * (1 + 4)  # six steps: the loss and four gradients
    assert report["debug_summary"]["gradient_explosions"] == 6
    assert report["parameters"]["nan_parameters"] == 67
    assert report["performance"]["loss"]["nan"] == 6
    assert kinds(debugger).count("nan_parameter_detected") == 1, "parameters that stay NaN are reported once"


def test_an_ordinary_session_reports_nothing_wrong():
    model, logger = small_model(), Logger()
    with debug_training_session(model, logger, log_dir="logs", **QUIET) as debugger:
        train(model)
    assert kinds(debugger) == []
    assert {level for level, _ in logger.said} == {"info"}


def test_a_user_logger_is_not_flooded_by_trouble_that_stays():
    model, logger = small_model(), Logger()
    with debug_training_session(model, logger, log_dir="logs", **QUIET):
        train(model, bad_input=5)
    assert len([message for _, message in logger.said if "The loss is NaN" in message]) == 5 + 2  # then the 8th, 16th


def test_without_gradient_checking_nothing_is_checked():
    model = small_model()
    with debug_training_session(model, log_dir="logs", enable_gradient_checking=False, **QUIET) as debugger:
        train(model, factors={25: 1e4})
    assert debugger.gradient_explosions == 0
    assert saved()["gradients"] == {}


def test_the_norm_before_clipping_is_the_one_that_is_judged():
    model = small_model()
    with debug_training_session(model, log_dir="logs", **QUIET) as debugger:
        train(model, factors={25: 1e4}, clip=0.1)
    assert debugger.gradient_explosions == 1
    assert max(debugger.gradient_norms) > 100


def test_a_step_that_was_checked_by_hand_is_not_checked_again():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with debug_training_session(model, log_dir="logs", **QUIET) as debugger:
        for step in range(4):
            x, y = batch(step)
            if step % 2:
                debugger.debug_training_step(model, x, y, nn.functional.cross_entropy, optimizer)
            else:
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        debugger.get_debug_summary()
        for kept in (debugger.losses, debugger.gradient_norms, debugger.forward_times, debugger.backward_times):
            assert kept.total == 4


def test_a_threshold_of_the_user_counts_in_automatic_checks_too():
    model = small_model()
    with debug_training_session(model, log_dir="logs", **QUIET) as debugger:
        debugger.gradient_threshold = 1e-6
        train(model)
    assert debugger.gradient_explosions == STEPS


def test_the_summary_inside_the_block_knows_all_steps_before_it():
    model, seen = small_model(), []
    with debug_training_session(model, log_dir="logs", **QUIET) as debugger:
        train(
            model, factors={20: math.inf}, after=lambda step: step == 20 and seen.append(debugger.get_debug_summary())
        )
    assert seen[0]["inf_detections"] + seen[0]["nan_detections"] > 0


def test_a_step_that_a_gradient_scaler_held_back_is_not_a_violation():
    model, scaler = small_model(), torch.amp.GradScaler("cpu", init_scale=2.0**127)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with debug_training_session(model, log_dir="logs", **QUIET) as debugger:
        for step in range(4):
            x, y = batch(step)
            scaler.scale(nn.functional.cross_entropy(model(x), y) * 8).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scaler.get_scale() < 2.0**127, "the first step was held back"
    assert not [kind for kind in kinds(debugger) if "gradient" in kind]


def test_findings_reach_the_logger_at_the_level_of_their_severity():
    class Log(nn.Module):
        def forward(self, x):
            return torch.log(x - 100)

    model, logger = nn.Sequential(nn.Linear(4, 4), Log(), nn.Linear(4, 3)), Logger()
    with debug_training_session(model, logger, log_dir="logs", **QUIET) as debugger:
        train(model)
    (first, *_) = debugger.findings
    assert any(level == "error" and first.cause in message for level, message in logger.said)
    events = [event["data"]["kind"] for event in debugger.debug_events if event["event_type"] == "finding"]
    assert first.kind in events


def test_profiler_stacks_are_on_unless_an_anomaly_scope_is_open():
    def has_stacks(**flags):
        model = small_model()
        with debug_training_session(
            model, log_dir="logs", enable_memory_tracking=False, enable_profiling=True, **flags
        ):
            train(model, steps=PROFILED)
        latest = max(Path("logs").glob("profile_*.json"), key=lambda path: path.name)
        return any(event.get("cat") == "python_function" for event in json.loads(latest.read_text())["traceEvents"])

    assert has_stacks(enable_anomaly_detection=False)
    assert not has_stacks(enable_anomaly_detection=True)


def test_a_profile_has_stacks_though_anomaly_detection_could_be_used_elsewhere(make):
    debugger = make(enable_anomaly_detection=True, enable_profiling=True)
    with debugger.profiling(output_file="profile.json"):
        train(small_model(), steps=PROFILED)
    events = json.loads(Path("profile.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "python_function" for event in events)


@pytest.mark.parametrize(("anomaly", "kernel"), [(False, ""), (True, ""), (True, "torch")])
def test_the_values_that_adam_and_sonde_read_are_not_blamed_on_the_user(make, anomaly, kernel, monkeypatch):
    monkeypatch.setenv("SONDE_KERNEL", kernel)
    debugger, model = make(enable_profiling=True), small_model()
    with debugger.anomaly_detection(enabled=anomaly), debugger.profiling():
        train(model, steps=PROFILED, optimizer=torch.optim.Adam(model.parameters(), foreach=False))
    assert not [text for text in debugger.last_profile["verdict"] if "a step" in text and "called" in text]


def test_values_that_the_user_reads_are_named_with_and_without_stacks(make):
    debugger, model = make(enable_profiling=True), small_model()
    for anomaly in (False, True):
        with debugger.anomaly_detection(enabled=anomaly), debugger.profiling():
            train(model, steps=PROFILED, after=lambda step: [torch.ones(1).item() for _ in range(6)])
        assert any(".item() called 6 times a step" in text for text in debugger.last_profile["verdict"])


def test_the_report_has_what_the_profile_found(make):
    debugger, model = make(enable_profiling=True), small_model()
    with debugger.profiling():
        train(model, steps=PROFILED)
    report = json.loads(debugger.save_debug_report("report.json").read_text())
    operators = report["profile"]["slowest_operators"]
    assert any("addmm" in name for name in operators)
    assert sum(each["share"] for each in operators.values()) <= 1.0


# ------------------------------------------------------------------ memory


def test_a_block_that_keeps_hundreds_of_megabytes_is_an_event_with_its_line(make):
    fake = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.ones(5, 3), static_shapes=False)
    debugger, kept = make(enable_memory_tracking=True), [torch.nn.LazyLinear(4), fake]  # without a shape to compare
    with debugger.memory_tracking():
        kept.append(torch.ones(200 << 20, dtype=torch.uint8))  # the block
    (event,) = (event for event in debugger.debug_events if event["event_type"] == "excessive_memory_detected")
    assert event["data"]["bytes"] == pytest.approx(200 << 20, rel=0.05)
    number = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "# the block" in text)
    assert any(line.endswith(f"test_sessions.py:{number}") for line in event["data"]["lines"])
    statistics = debugger.get_debug_summary()["memory_statistics"]["process"]
    assert statistics["growth_bytes"] > 150 << 20
    assert statistics["peak_bytes"] >= statistics["bytes"] > statistics["growth_bytes"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA loads kernels into the same memory")
def test_memory_that_no_tensor_stands_for_is_found_too(make):
    debugger = make(enable_memory_tracking=True)
    with debugger.memory_tracking():
        kept = bytearray(200 << 20)
    assert "excessive_memory_detected" in kinds(debugger)
    assert len(kept) == 200 << 20


def test_what_a_library_may_have_allocated_when_it_was_loaded_is_not_blamed_on_the_block(make, tmp_path):
    source = next(Path(msgspec.__file__).parent.glob("*.so"))
    library = shutil.copy(source, tmp_path / "mine.so")
    debugger = make(enable_memory_tracking=True)
    with debugger.memory_tracking():
        ctypes.PyDLL(library)
        kept = bytearray(200 << 20)
    assert "excessive_memory_detected" not in kinds(debugger)
    with debugger.memory_tracking():
        ctypes.PyDLL(shutil.copy(source, tmp_path / "other.so"))
        tensor = torch.ones(200 << 20, dtype=torch.uint8)
    assert "excessive_memory_detected" in kinds(debugger), "what tensors hold is known all the same"
    assert len(kept) == len(tensor)


def test_a_block_that_gives_its_memory_back_is_left_alone(make):
    debugger = make(enable_memory_tracking=True)
    with debugger.memory_tracking():
        torch.ones(200 << 20, dtype=torch.uint8).sum()
    assert "excessive_memory_detected" not in kinds(debugger)


def test_what_a_model_and_its_optimizer_need_is_not_excessive(make):
    debugger = make(enable_memory_tracking=True)
    with debugger.memory_tracking():
        model = nn.Linear(3000, 3000)  # 34 MiB, its gradient and Adam's two moments as much each
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            model(torch.ones(1, 3000)).sum().backward()
            optimizer.step()
    assert debugger.get_debug_summary()["memory_statistics"]["process"]["growth_bytes"] > 120 << 20
    assert "excessive_memory_detected" not in kinds(debugger)


def test_thirty_steps_of_growth_are_a_leak_with_its_line(make):
    debugger, kept = make(enable_memory_tracking=True), []
    with debugger.memory_tracking():
        train(small_model(), after=lambda step: kept.append(torch.ones(1 << 20, dtype=torch.uint8)))  # the growth
    events = [event for event in debugger.debug_events if event["event_type"] == "memory_leak_detected"]
    assert len(events) == 1
    number = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "# the growth" in text)
    assert any(line.endswith(f"test_sessions.py:{number}") for line in events[0]["data"]["lines"])


def test_thirty_healthy_steps_are_no_leak(make):
    debugger = make(enable_memory_tracking=True)
    with debugger.memory_tracking():
        train(small_model())
    assert kinds(debugger) == ["memory_tracking_start", "memory_tracking_end"]


# ------------------------------------------------------------------ what is cleared


def test_a_pass_without_layer_hooks_leaves_no_table_of_an_earlier_pass(make):
    debugger, model = make(), small_model()
    debugger.debug_forward_pass(model, batch()[0])
    assert debugger.last_forward
    debugger.debug_forward_pass(model, batch()[0], layer_hooks=False)
    assert debugger.last_forward == {}
