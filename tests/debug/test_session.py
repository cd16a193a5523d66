"""The debug session on real models: it attaches by itself, acts when asked, and leaves training alone."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

import sonde
from sonde.debug import (
    DebugConfig,
    DebugSession,
    HookAction,
    HookBuilder,
    HookCondition,
    HookTrigger,
    TrainingStopped,
    debug_session,
    resume_run,
)
from sonde.debug.pause import PAUSED
from sonde.errors import ClosedError, OptionError
from sonde.testing import assert_no_taps, tiny_mlp


def train(session, model, optimizer, steps=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(16, 8, generator=generator)
        loss = nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if session is not None:
            session.log(loss=loss)


@pytest.fixture
def parts():
    torch.manual_seed(0)
    model = tiny_mlp()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def hooked(session, trigger, action, patterns=("0",), **options):
    builder = HookBuilder("h").trigger(trigger).action(action).layer_patterns(list(patterns))
    return session.hooks.register(builder.build())


def test_it_attaches_by_itself_and_its_parts_know_the_model(parts, tmp_path):
    model, optimizer = parts
    with debug_session(model, optimizer, DebugConfig(output_dir=tmp_path)) as session:
        train(session, model, optimizer, 30)
        session.snapshot()
        history = session.gradient_debugger.get_layer_history("0.weight")
    assert [point.step for point in history] == list(range(1, 31))
    assert session.model_diagnostics.architecture.total_parameters == sum(p.numel() for p in model.parameters())
    assert session.model_diagnostics.analyze_training_dynamics().steps == 30
    run = sonde.open_run(session.report.run)
    assert run.series("0.weight:gradient", "norm").values[-1] == pytest.approx(history[-1].norm)
    assert json.loads((run.path / "debug_report.json").read_text())["steps"] == 30
    assert_no_taps(model)


def test_training_is_bit_identical_with_a_session_and_hooks():
    results = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))
        optimizer = torch.optim.Adam(model.parameters())
        if watched:
            with debug_session(model, optimizer) as session:
                hooked(session, HookTrigger.EveryForward, HookAction.InspectTensor, ("*",))
                hooked(session, HookTrigger.EveryBackward, HookAction.TrackGradients, ("*",))
                train(session, model, optimizer)
        else:
            train(None, model, optimizer)
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_plainly_with_await_and_as_async_context(parts, tmp_path):
    model, optimizer = parts
    plain = debug_session(model, optimizer)
    plain.start()
    train(plain, model, optimizer, 3)
    assert plain.stop().steps == 3
    assert plain.stop() is plain.report

    async def awaited():
        session = debug_session(model, optimizer)
        await session.start()
        train(session, model, optimizer, 3)
        return await session.stop()

    async def scoped():
        async with debug_session(model, optimizer) as session:
            train(session, model, optimizer, 3)
        return session.report

    assert asyncio.run(awaited()).steps == asyncio.run(scoped()).steps == 3
    with pytest.raises(ClosedError, match="Make a new one"):
        plain.start()


def test_without_an_output_dir_nothing_is_kept(parts):
    model, optimizer = parts
    with debug_session(model, optimizer) as session:
        train(session, model, optimizer, 2)
        folder = session.folder
    assert session.report.run is None
    assert not folder.exists()


def test_hand_fed_data_needs_no_model():
    session = DebugSession(DebugConfig()).start()
    number = session.debug_tensor([1.0, float("nan")], "x", "layer_1", "forward")
    session.debug_gradients("layer_1", [0.01, 0.02])
    report = session.stop()
    assert session.tensor_inspector.get_tensor_info(number).stats.nan_count == 1
    assert report.summary().critical_issues == 1
    assert "x in layer_1: 1 of 2 elements are NaN" in report.summary().issues


def test_inspect_and_track_hooks_act_on_the_live_model(parts):
    model, optimizer = parts
    with debug_session(model, optimizer) as session:
        hooked(session, HookTrigger.EveryForward, HookAction.InspectTensor, ("0",))
        number = hooked(session, HookTrigger.EveryBackward, HookAction.TrackGradients, ("2",))
        hooked(session, HookTrigger.EveryForward, HookAction.RecordActivations, ("1",))
        train(session, model, optimizer, 10)
        model.zero_grad()
    assert len(session.tensor_inspector.get_tensors_by_layer("0")) == 10
    assert session.hooks.get_statistics()[number].executions == 10
    assert session.gradient_debugger.get_layer_history("2")
    assert session.gradient_debugger.dead_units()[0].units == 16


def test_conditions_see_the_loss_of_the_live_model(parts):
    model, optimizer = parts
    with debug_session(model, optimizer) as session:
        never = hooked(session, HookTrigger.Conditional(HookCondition.LossThreshold(1e6)), HookAction.Alert("loss!"))
        often = hooked(session, HookTrigger.Conditional(HookCondition.LossThreshold(1e-6)), HookAction.Alert("loss"))
        for _ in range(5):
            train(session, model, optimizer, 2)
            session.snapshot()
    statistics = session.hooks.get_statistics()
    assert statistics[never].executions == 0
    assert statistics[often].executions > 0


def test_snapshots_are_written_into_the_run_with_shape_and_type(parts, tmp_path):
    model, optimizer = parts
    with debug_session(model, optimizer, DebugConfig(output_dir=tmp_path)) as session:
        hooked(session, HookTrigger.EveryNSteps(2), HookAction.SaveSnapshot())
        train(session, model, optimizer, 5)
        folder = session.folder
    files = sorted((folder / "snapshots").iterdir())
    assert len(files) == 2  # in steps 2 and 4
    assert load_file(files[0])["0"].shape == (16, 16)
    assert [event.event_type for event in sonde.open_run(folder).events].count("snapshot") == 2


def test_alerts_reach_log_listener_run_and_webhook(parts, tmp_path, caplog):
    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        heard = []
        session = debug_session(config=DebugConfig(output_dir=tmp_path))
        with session:
            session.on_alert(heard.append)
            address = f"http://127.0.0.1:{server.server_port}/alert"
            hooked(session, HookTrigger.Once, HookAction.Alert("look here", "critical", address), ("fc",))
            session.hooks.execute_hooks("fc", [1.0])
            folder = session.folder
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert heard[0]["message"] == received[0]["message"] == "look here (fc, step 0)"
    assert "look here" in caplog.text
    assert [event.message for event in sonde.open_run(folder).events if event.event_type == "alert"] == [
        "look here (fc, step 0)"
    ]


def test_a_webhook_that_is_down_does_not_stop_training(caplog):
    session = DebugSession().start()
    hooked(session, HookTrigger.EveryForward, HookAction.Alert("x", webhook="http://127.0.0.1:9/none"), ("fc",))
    assert session.hooks.execute_hooks("fc", [1.0])[0].success
    session.stop()
    assert session.webhooks.failed == 1


def test_a_pause_lasts_until_another_process_ends_it(parts, tmp_path):
    model, optimizer = parts
    naps = []

    def nap(seconds):
        naps.append(seconds)
        assert len(naps) < 10, "nobody ends the pause"
        if len(naps) == 3:
            assert resume_run(session.folder)["step"] == 2

    session = DebugSession(DebugConfig(output_dir=tmp_path), model, optimizer, sleep=nap)
    with session:
        builder = HookBuilder("pause").trigger(HookTrigger.Conditional(HookCondition.StepRange(2, 3)))
        session.hooks.register(builder.action(HookAction.PauseTraining).layer_patterns(["0"]).max_executions(1).build())
        train(session, model, optimizer, 4)
        assert not (session.folder / PAUSED).exists()
        assert resume_run(session.folder) is None
    assert len(naps) == 3
    assert session.step == 4


def test_stop_ends_the_training_and_the_context_quietly(parts):
    model, optimizer = parts
    with debug_session(model, optimizer) as session:
        hooked(session, HookTrigger.Conditional(HookCondition.StepRange(3, 100)), HookAction.StopTraining)
        train(session, model, optimizer, 50)
        pytest.fail("the training went on")
    assert session.step == 2, "the third step was under way"
    session = debug_session(model, optimizer).start()
    hooked(session, HookTrigger.EveryForward, HookAction.StopTraining)
    with pytest.raises(TrainingStopped, match="stopped the training at step 1"):
        train(session, model, optimizer, 50)
    session.stop()


def test_an_error_in_the_training_is_not_swallowed(parts):
    model, optimizer = parts
    with pytest.raises(ZeroDivisionError), debug_session(model, optimizer):
        raise ZeroDivisionError


def test_a_hook_can_drop_into_a_debugger(parts, monkeypatch):
    calls = []
    monkeypatch.setattr("sys.breakpointhook", lambda: calls.append(1))
    with DebugSession() as session:
        hooked(session, HookTrigger.Once, HookAction.Breakpoint, ("fc",))
        session.hooks.execute_hooks("fc", [1.0])
    assert calls == [1]


def test_a_hook_can_capture_a_bundle(parts, tmp_path):
    model, optimizer = parts
    with debug_session(model, optimizer, DebugConfig(output_dir=tmp_path)) as session:
        hooked(session, HookTrigger.Conditional(HookCondition.StepRange(2, 3)), HookAction.CaptureBundle, ("2",))
        train(session, model, optimizer, 4)
        folder = session.folder
    assert list((folder / "bundles").iterdir())


def test_sampling_looks_at_each_tenth_step(parts, tmp_path):
    model, optimizer = parts
    config = DebugConfig(output_dir=tmp_path, sampling_rate=0.1)
    with debug_session(model, optimizer, config) as session:
        number = hooked(session, HookTrigger.EveryForward, HookAction.InspectTensor, ("0",))
        train(session, model, optimizer, 41)
        folder = session.folder
    steps = sonde.open_run(folder).series("0.weight:gradient", "norm").steps
    assert steps.tolist() == [10, 20, 30, 40]
    assert session.hooks.get_statistics()[number].executions == 4, "hooks see the steps that the run has"


@pytest.mark.parametrize("rate", [0.29, 0.3, 0.4, 2 / 3, 0.7, 0.95])
def test_the_share_of_steps_that_is_looked_at_is_the_one_asked_for(rate):
    chosen = [step for step in range(1, 1001) if DebugConfig(sampling_rate=rate).schedule(step)]
    assert len(chosen) == pytest.approx(1000 * rate, abs=1)
    gaps = {after - before for before, after in itertools.pairwise(chosen)}
    assert gaps <= {int(1 / rate), int(1 / rate) + 1}, "they are spread evenly"


def test_history_and_tracking_are_bounded_as_configured(parts):
    model, optimizer = parts
    config = DebugConfig(max_gradient_history=5, max_tracked_tensors=7)
    with debug_session(model, optimizer, config) as session:
        hooked(session, HookTrigger.EveryForward, HookAction.InspectTensor, ("*",))
        train(session, model, optimizer, 20)
    assert len(session.gradient_debugger.get_layer_history("0.weight")) == 5
    assert len(session.tensor_inspector.get_all_tensors()) == 7


def test_the_dashboard_is_one_file(parts, tmp_path):
    model, optimizer = parts
    with debug_session(model, optimizer, DebugConfig.deep(tmp_path)) as session:
        train(session, model, optimizer, 5)
    page = Path(session.report.dashboard).read_text(encoding="utf-8")
    assert "gradient" in page
    assert 'src="http' not in page


@pytest.mark.parametrize("preset", ["light", "standard", "deep", "production"])
def test_presets_make_sessions_that_run(parts, preset):
    model, optimizer = parts
    with debug_session(model, optimizer, getattr(DebugConfig, preset)()) as session:
        train(session, model, optimizer, 3)
    assert session.report.steps == 3


def test_findings_are_issues_with_their_fix(parts):
    model, optimizer = parts
    with debug_session(model, optimizer) as session:
        for _ in range(8):
            x = torch.randn(16, 8)
            nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
            optimizer.step()
    summary = session.report.summary()
    assert summary.critical_issues >= 1
    assert any("zero_grad" in text for text in summary.recommendations)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("sampling_rate", 0),
        ("sampling_rate", "0.1"),
        ("sampling_rate", float("nan")),
        ("max_tracked_tensors", 0),
        ("max_gradient_history", 2.5),
        ("output_dir", 5),
    ],
)
def test_a_senseless_config_is_reported(option, value):
    with pytest.raises(OptionError, match=f"{option} takes .*got {value!r}"):
        DebugConfig(**{option: value})


def test_swapped_arguments_of_a_session_are_reported(parts):
    with pytest.raises(OptionError, match=r"config takes a DebugConfig; got Sequential. Write debug_session\(model"):
        DebugSession(parts[0])
    with pytest.raises(OptionError, match=r"model takes a torch.nn.Module; got DebugConfig. .*config=config"):
        debug_session(DebugConfig())


def test_export_is_strict_json_at_any_time(parts, tmp_path):
    model, optimizer = parts
    session = debug_session(model, optimizer).start()
    session.debug_tensor([float("inf")], "x")
    during = json.loads(session.export(tmp_path / "a.json").read_text(), parse_constant=pytest.fail)
    session.stop()
    after = json.loads(session.export(tmp_path / "b.json").read_text(), parse_constant=pytest.fail)
    assert during["session_id"] == after["session_id"]


@pytest.mark.parametrize("suffix", [".html", ".md"])
def test_a_report_is_written_for_readers_too(tmp_path, suffix):
    with DebugSession() as session:
        session.debug_tensor([float("nan")], "scores <&>")
        session.debug_gradients("fc", [0.5])
        session.profiler.record_layer_execution("fc", "Linear", 0.25)
    written = session.report.save(tmp_path / f"report{suffix}").read_text(encoding="utf-8")
    for words in ("1 of 1 elements are NaN", "Slowest layers", "Linear", "critical"):
        assert words in written
    assert "scores <&>" not in written, "names are escaped"


def test_a_hook_is_live_from_the_next_pass_on_and_gone_after_the_session(parts):
    model, optimizer = parts
    seen = []
    hook = HookBuilder("now").trigger(HookTrigger.EveryForward).action(HookAction.CustomCallback(seen.append))
    with debug_session(model, optimizer) as session:
        number = session.hooks.register(hook.layer_patterns(["(model)"]).build())
        model(torch.zeros(1, 8))
        assert len(seen) == 1
        session.hooks.enable(number, False)
        model(torch.zeros(1, 8))
        assert len(seen) == 1
    session.hooks.enable(number)
    assert_no_taps(model)


def test_the_profiler_knows_what_each_layer_took(parts):
    model, optimizer = parts
    with debug_session(model, optimizer, DebugConfig(enable_profiling=True)) as session:
        train(session, model, optimizer, 4)
    profiles = session.profiler.get_layer_profiles()
    assert set(profiles) == {"0", "1", "2"}
    assert profiles["0"]["type"] == "Linear"
    assert profiles["0"]["parameters"] == 8 * 16 + 16
    assert profiles["0"]["forward"]["mean"] > 0
    assert profiles["2"]["backward"]["mean"] > 0
    assert_no_taps(model)
