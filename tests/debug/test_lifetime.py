"""A session's life: verbs at the wrong time, loops that raise, several sessions, sessions without a model."""

from __future__ import annotations

import logging
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from torch import nn

import sonde
from sonde.debug import DebugConfig, debug_session, debug_session_with_config
from sonde.errors import ClosedError, MissingExtra
from sonde.testing import assert_no_taps, tiny_mlp


def made(seed=0):
    torch.manual_seed(seed)
    model = tiny_mlp()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model, optimizer, steps):
    for _ in range(steps):
        x = torch.randn(16, 8)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
        optimizer.step()


def test_verbs_before_the_start_and_after_the_end_say_what_to_do():
    session = debug_session(*made())
    with pytest.raises(ClosedError, match=r"log\(\) on a debug session that has not started: call start"):
        session.log(loss=1.0)
    session.start()
    with pytest.raises(ClosedError, match="is running"):
        session.start()
    session.stop()
    with pytest.raises(ClosedError, match=r"record\(\) on a debug session that has stopped: make a new one"):
        session.record("x", [1.0])
    with pytest.raises(ClosedError, match="has stopped"):
        session.start()


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ValueError("boom"), "failed", "exception"),
        (SystemExit(3), "failed", "exception"),
        (KeyboardInterrupt(), "interrupted", "interrupted"),
    ],
    ids=repr,
)
def test_a_loop_that_raises_leaves_a_run_that_says_so_with_a_report_and_the_error_goes_on(
    tmp_path, error, status, kind
):
    model, optimizer = made()
    with (
        pytest.raises(type(error)) as caught,
        debug_session(model, optimizer, DebugConfig(output_dir=tmp_path)) as session,
    ):
        train(model, optimizer, 3)
        raise error
    assert caught.value is error
    assert session.report.steps == 3
    run = sonde.open_run(session.report.run)
    assert run.status == status
    (event,) = (event for event in run.events if event.event_type == kind)
    assert event.message.startswith(type(error).__name__)
    assert (run.path / "debug_report.json").is_file()
    assert_no_taps(model)


def test_two_sessions_at_once_each_see_their_own_model(tmp_path):
    (one, first), (two, second) = made(0), made(1)
    config = DebugConfig(output_dir=tmp_path)
    with debug_session(one, config=config) as a, debug_session(two, config=config) as b:
        train(one, first, 3)
        train(two, second, 5)
    assert (a.report.steps, b.report.steps) == (3, 5), "each counts the steps of its own optimizer"
    assert a.report.run != b.report.run
    assert [sonde.open_run(each.report.run).steps.tolist()[-1] for each in (a, b)] == [3, 5]
    assert_no_taps(one)
    assert_no_taps(two)


def test_a_model_without_values_is_watched_in_silence(caplog):
    model = nn.Sequential(nn.Linear(3, 3, device="meta"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, "sonde"), debug_session(model, optimizer) as session:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.empty(2, 3, device="meta")).sum().backward()
            optimizer.step()
    assert (session.report.steps, session.report.issues) == (2, ())
    assert session.model_diagnostics.architecture.total_parameters == 12
    assert not caplog.records, "no part of the session stumbled over it"


def test_one_model_in_two_sessions_is_recorded_by_both():
    model, optimizer = made()
    with debug_session(model, optimizer) as a, debug_session(model, optimizer) as b:
        train(model, optimizer, 4)
    histories = [each.gradient_debugger.get_layer_history("0.weight") for each in (a, b)]
    assert histories[0] == histories[1]
    assert len(histories[0]) == 4


def test_a_gradient_that_is_handed_in_and_recorded_as_well_counts_once_in_its_step():
    model, optimizer = made()
    with debug_session(model, optimizer) as session:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            for name, parameter in model.named_parameters():
                session.gradient_debugger.record_gradient_flow(name, parameter.grad)
            optimizer.step()
    assert [point.step for point in session.gradient_debugger.get_layer_history("0.weight")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("kept", [False, True])
def test_losses_logged_without_a_model_make_steps_and_are_judged(tmp_path, kept):
    with debug_session_with_config(DebugConfig(output_dir=tmp_path if kept else None)) as session:
        for step in range(30):
            session.log(loss=torch.tensor(2.0 / (step + 1), requires_grad=True))
            session.log(accuracy=step / 30)
    assert session.report.steps == 30
    assert session.model_diagnostics.analyze_training_dynamics().convergence_status == "converging"
    if kept:
        series = sonde.open_run(session.report.run).series("accuracy:scalar", "mean")
        assert series.steps.tolist() == list(range(1, 31))
        assert series.values[14] == pytest.approx(14 / 30)


def test_diagnostics_alone_still_judge_the_training():
    model, optimizer = made()
    config = DebugConfig(enable_tensor_inspection=False, enable_gradient_debugging=False)
    with debug_session(model, optimizer, config) as session:
        for _ in range(8):
            x = torch.randn(16, 8)
            nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
            optimizer.step()
    assert any("zero_grad" in finding.fix for finding in session.findings)
    assert session.model_diagnostics.analyze_training_dynamics().steps == 8


def test_a_gradient_that_explodes_in_the_last_step_is_reported_when_the_session_stops_without_diagnostics(tmp_path):
    model, optimizer = made()
    config = DebugConfig(output_dir=tmp_path, enable_model_diagnostics=False)
    with debug_session(model, optimizer, config) as session:
        train(model, optimizer, 20)
        optimizer.zero_grad()
        (1e6 * model(torch.randn(16, 8)).square().mean()).backward()
        optimizer.step()
    assert {alert.kind for alert in session.gradient_debugger.get_alerts()} == {"exploding"}
    assert "exploding" in {alert["kind"] for alert in session.alerts}


def test_with_everything_off_only_hooks_and_what_is_logged_remain(tmp_path):
    model, optimizer = made()
    off = {"enable_tensor_inspection": False, "enable_gradient_debugging": False, "enable_model_diagnostics": False}
    with debug_session(model, optimizer, DebugConfig(output_dir=tmp_path, **off)) as session:
        for _ in range(3):
            train(model, optimizer, 1)
            session.log(loss=1.0)
    run = sonde.open_run(session.report.run)
    assert run.series("loss:scalar", "mean").steps.tolist() == [1, 2, 3]
    assert not any(site.quantity in ("gradient", "parameter", "output") for site in run.sites)


def test_a_dashboard_that_cannot_be_made_is_reported_at_the_start(monkeypatch, caplog, tmp_path):
    with caplog.at_level(logging.WARNING, "sonde"):
        debug_session(config=DebugConfig(enable_visualization=True)).start().stop()
    assert "no effect without an output_dir" in caplog.text
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(MissingExtra, match="plotly"):
        debug_session(config=DebugConfig(enable_visualization=True, output_dir=tmp_path)).start()


def test_sessions_without_a_place_for_them_make_one_each_even_at_the_same_moment(tmp_path):
    (tmp_path / "session-1").mkdir()
    (tmp_path / "session-2").write_text("a file in the way")
    session = debug_session(config=DebugConfig(output_dir=tmp_path)).start()
    assert session.folder == tmp_path / "session-3"
    session.stop()


def test_what_is_handed_in_takes_no_more_memory_than_the_config_allows_however_much_it_is():
    session = debug_session(config=DebugConfig(max_tracked_tensors=30, max_gradient_history=10)).start()
    values = np.random.default_rng(0).standard_normal(1000)

    def hand_in(steps):
        for step in range(steps):
            for name in range(40):
                session.tensor_inspector.inspect_tensor(values, f"tensor {name}", f"layer {step}", describe=False)
                session.gradient_debugger.record_gradient_flow(f"layer {name}", values * (1 + step % 3))
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        early = hand_in(15)
        late = hand_in(15)
    finally:
        tracemalloc.stop()
    assert late - early < 0.02 * 15 * 40 * 2 * values.nbytes, "what is forgotten takes no room"
    assert len(session.tensor_inspector.get_all_tensors()) == 30
    assert session.tensor_inspector.memory_usage() == 30 * values.nbytes
    assert len(session.gradient_debugger.get_layer_history("layer 39")) == 10
    report = session.stop()
    assert (report.tensors["total_inspected"], report.tensors["evicted"]) == (1200, 1170)
