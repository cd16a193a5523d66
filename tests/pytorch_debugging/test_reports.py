"""What a debugger keeps, says and reports: bounded, strict, escaped, to any logger."""

from __future__ import annotations

import gc
import json
import logging
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.pytorch_debugging.conftest import batch, kinds, small_model
from torch import nn

import sonde
from sonde.errors import OptionError
from sonde.pytorch_debugging import PyTorchDebugger, create_pytorch_debugger
from sonde.pytorch_debugging.events import EventList, Kept, plain


def strict(text):
    def refuse(word):
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse)


SUMMARY = {
    "debug_mode",
    "anomaly_detected",
    "profiler_active",
    "nan_detections",
    "inf_detections",
    "gradient_explosions",
    "gradient_vanishing",
    "debug_events_count",
    "memory_snapshots_count",
    "gradient_violations_count",
}


def test_the_report_is_strict_json_with_the_known_sections_and_tensors_summarised(make):
    debugger = make()
    data = {"loss": math.nan, "weights": torch.randn(50, 50), "array": np.full(3, np.inf), "odd": object(), 3: {1, 2}}
    debugger._log_debug_event("mine", "told", data)
    report = strict(debugger.save_debug_report("debug_report.json").read_text())
    assert {"debug_summary", "debug_events", "memory_snapshots", "gradient_violations", "timestamp"} <= set(report)
    assert set(report["debug_summary"]) == SUMMARY
    told = report["debug_events"][0]
    assert set(told) == {"timestamp", "event_type", "message", "data"}
    assert told["data"]["loss"] == "nan"
    assert told["data"]["array"] == ["inf"] * 3
    assert told["data"]["weights"]["shape"] == [50, 50]
    assert abs(told["data"]["weights"]["mean"]) < 0.2


def test_the_default_file_is_in_the_log_directory_and_never_replaces_another(make):
    debugger = make()
    first, second = debugger.save_debug_report(), debugger.save_debug_report()
    assert first != second
    assert first.parent == debugger.log_dir
    assert re.fullmatch(r"debug_report_\d{8}_\d{6}\.json", first.name)


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.seen, self.open = [], []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        assert not {name for name, _ in attributes} & {"src", "onload", "onclick"}
        assert all(value.startswith("#") for name, value in attributes if name == "href")
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("format", ["md", "html"])
def test_markdown_and_html_reports_show_the_numbers_and_escape_every_text(make, format):
    debugger, model = make(), small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        debugger.debug_training_step(model, *batch(step), nn.functional.cross_entropy, optimizer, 1e-3)
    debugger._log_debug_event("mine", "<script>alert('x')</script> | *bold*")
    text = debugger.save_debug_report(f"report.{format}").read_text()
    assert "<script>alert" not in text
    for shown in ("Gradient violations", "Layers in the last forward pass", "0.weight", "6x8 float32"):
        assert shown in text
    if format == "html":
        tags = Tags()
        tags.feed(text)
        assert tags.open == []
        assert {"table", "svg", "polyline"} <= set(tags.seen)
        assert "http://" not in text
        assert "https://" not in text
    else:
        rows = [line for line in text.splitlines() if line.startswith("|")]
        assert rows
        assert all(line.endswith("|") for line in rows)


def test_the_format_can_be_named_and_an_unknown_one_is_refused(make):
    debugger = make()
    assert debugger.save_debug_report("notes.txt", format="html").read_text().startswith("<!doctype html>")
    assert debugger.save_debug_report(format="md").suffix == ".md"
    with pytest.raises(OptionError, match="choose from json, md, html"):
        debugger.save_debug_report(format="pdf")


def test_ten_thousand_steps_keep_the_report_and_the_memory_bounded(make):
    debugger = make(max_kept=200)

    def steps(number):
        for step in range(number):
            debugger._log_debug_event("forward_pass_debug", "a pass", {"activations": {str(step): {"mean": 1.0}}})
            if step % 10 == 0:
                debugger._log_debug_event("gradient_explosion", "too large", {"gradient_norm": 15.5})
            debugger.gradient_norms.append(step)
        debugger._notes._session.flush()
        gc.collect()
        return len(gc.get_objects())

    before = steps(1_000)
    assert steps(9_000) - before < 1_000  # unbounded, each event would leave two objects at least
    assert debugger.get_debug_summary()["debug_events_count"] == 11_000
    report = debugger.save_debug_report("long.json")
    assert report.stat().st_size < 200_000
    assert strict(report.read_text())["left_out"]["debug_events"] == 10_800
    assert debugger.save_debug_report("long.html").stat().st_size < 100_000


def test_everyday_events_do_not_push_out_the_one_that_matters():
    events = EventList(50)
    for step in range(1000):
        events.append({"event_type": "forward_pass_debug", "step": step})
        if step == 500:
            events.append({"event_type": "nan_loss_detected", "step": step})
    found = [event["step"] for event in events if event["event_type"] == "nan_loss_detected"]
    assert found == [500]
    assert [event["step"] for event in events] == sorted(event["step"] for event in events)
    assert (events.total, events[-1]["step"]) == (1001, 999)


@given(st.lists(st.integers()), st.integers(2, 20))
def test_a_kept_list_has_the_first_and_the_last_items(items, most):
    kept = Kept(most)
    for item in items:
        kept.append(item)
    assert kept.total == len(items)
    assert len(kept) == min(len(items), most)
    first = max(1, most // 5)
    assert list(kept)[:first] == items[:first]
    assert list(kept)[first:] == items[first:][-(most - first) :]


NESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=4),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner),
    max_leaves=20,
)


@given(NESTED)
def test_any_value_becomes_strict_json(value):
    json.dumps(plain(value), allow_nan=False)


def test_values_that_contain_themselves_are_cut(make):
    endless = []
    endless.append(endless)
    json.dumps(plain({"x": endless}), allow_nan=False)
    assert len(plain("x" * 100_000)) < 10_000
    assert len(plain(list(range(100_000)))) == 1001


def test_clearing_forgets_data_and_counters_but_not_the_run(make):
    debugger, model = make(), small_model()
    model(batch()[0]).sum().backward()
    model[0].weight.grad[0, 0] = math.nan
    debugger.check_gradients(model)
    debugger.check_model_parameters(model)
    debugger.debug_forward_pass(model, batch()[0])
    assert debugger.anomaly_detected
    debugger.clear_debug_data()
    summary = debugger.get_debug_summary()
    assert all(not value for name, value in summary.items() if name != "debug_mode")
    assert len(debugger.debug_events) == len(debugger.gradient_violations) == 0
    assert (debugger.last_gradients, debugger.last_parameters, debugger.last_forward) == (None, {}, {})
    debugger.close()
    assert sonde.open_run(debugger.run).events


def test_both_sets_of_defaults_are_kept(tmp_path):
    flags = ("debug_mode", "enable_anomaly_detection", "enable_profiling", "enable_memory_tracking")
    flags = (*flags, "enable_gradient_checking")
    plain_one, made = PyTorchDebugger(), create_pytorch_debugger()
    assert [getattr(plain_one, flag) for flag in flags] == [False] * 5
    assert [getattr(made, flag) for flag in flags] == [True, True, False, True, True]
    assert Path("debug_logs").is_dir()
    assert plain_one.run is None


def test_a_debugger_that_is_forgotten_finishes_its_run(tmp_path):
    debugger = create_pytorch_debugger(log_dir="logs")
    debugger._log_debug_event("mine", "told")
    path = debugger.run
    del debugger
    gc.collect()
    run = sonde.open_run(path)
    assert [event.event_type for event in run.events] == ["mine"]
    assert [each.status for each in sonde.list_runs("logs")] == ["finished"]


def test_a_directory_that_cannot_be_written_is_reported_once_and_training_goes_on(make, caplog, tmp_path):
    debugger, model = make(), small_model()
    debugger.log_dir.rmdir()
    debugger.log_dir.write_text("a file is in the way")
    model(batch()[0]).sum().backward()
    assert debugger.check_gradients(model, 1e-6) > 0
    assert debugger.check_gradients(model, 1e-6) > 0
    assert [record.message for record in caplog.records if "no run is written" in record.message][1:] == []
    assert debugger.run is None
    assert len(json.loads(debugger.save_debug_report(tmp_path / "r.json").read_text())["gradient_violations"]) == 2


def test_debuggers_in_one_directory_have_runs_of_their_own(make):
    first, second = make(), make()
    for each in (first, second):
        each._log_debug_event("mine", "told")
    assert {first.run.name, second.run.name} == {"run-0001", "run-0002"}


# ------------------------------------------------------------------ loggers


def test_a_standard_logger_gets_levels(make, caplog):
    debugger = make(logger=logging.getLogger("mine"))
    with caplog.at_level(logging.INFO, logger="mine"):
        debugger._log_debug_event("custom", "100 % fine")
        debugger._log_debug_event("gradient_vanishing", "small")
        debugger._log_debug_event("nan_loss_detected", "bad")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "100 % fine"),
        ("WARNING", "small"),
        ("ERROR", "bad"),
    ]


class Plain:
    def __init__(self):
        self.said = []

    def log_info(self, message):
        self.said.append(("info", message))

    def log_warning(self, message, data=None):
        self.said.append(("warning", message, data["x"]))

    def log_error(self, error, context):
        self.said.append(("error", str(error), context["x"]))


class Strange:
    def __init__(self):
        self.said = []

    def log_info(self, *args, **kwargs):
        self.said.append(args)

    def log_warning(self, event_type, message, *, extra):
        self.said.append((event_type, message, extra["x"]))

    def log_error(self, text, level="error", code=7):
        self.said.append((text, level, code))


@pytest.mark.parametrize(
    ("logger", "expected"),
    [
        (Plain(), [("info", "a"), ("warning", "b", 1), ("error", "c", 1)]),
        (Strange(), [("a",), ("gradient_vanishing", "b", 1), ("c", "error", 7)]),
    ],
    ids=["as the training logger", "with signatures of its own"],
)
def test_loggers_with_log_methods_get_what_their_signatures_ask_for(make, logger, expected):
    debugger = make(logger=logger)
    for kind, message in (("custom", "a"), ("gradient_vanishing", "b"), ("nan_loss_detected", "c")):
        debugger._log_debug_event(kind, message, {"x": 1})
    assert logger.said == expected


def test_without_a_logger_problems_are_reported_but_not_ten_thousand_times(make, caplog):
    debugger = make()
    for _ in range(100):
        debugger._log_debug_event("gradient_explosion", "too large")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 5 + 4  # five times, then at 8, 16, 32 and 64
    assert said[-1] == "too large (for the 64th time)"
    assert kinds(debugger) == ["gradient_explosion"] * 100
