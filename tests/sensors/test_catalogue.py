"""Sensors: each has a theme of the rules, says what it costs, and is attached only if someone wants its signals."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path

import pytest
import torch
from torch import nn

import sonde
from sonde import diagnosis
from sonde.core import signals
from sonde.core.facts import Facts
from sonde.diagnosis.rules import RULES, WANTED
from sonde.sensors.catalogue import SENSORS
from sonde.sensors.dispatcher import Sensors
from sonde.sensors.sensor import Sensor
from sonde.testing import MemorySink, tiny_mlp

SIGNALS = {value for name, value in vars(signals).items() if name.isupper() and isinstance(value, str)}
MOMENTS = [name for name in vars(Sensor) if name.startswith("on_")] + ["start", "listen"]


@pytest.mark.parametrize("kind", SENSORS, ids=lambda kind: kind.__name__)
def test_a_sensor_says_what_it_produces_and_costs_and_listens_to_something(kind):
    facts = {f"facts.{field.name}" for field in dataclasses.fields(Facts)}
    assert kind.produces
    assert set(kind.produces) <= SIGNALS | facts | {"input"}
    assert kind.cost
    assert inspect.getdoc(kind) != inspect.getdoc(Sensor)
    assert any(getattr(kind, moment) is not getattr(Sensor, moment) for moment in MOMENTS)


def test_sensors_have_the_themes_of_the_rules():
    themes = {rule.theme for rule in RULES}
    assert {kind.__module__.rpartition(".")[2] for kind in SENSORS} <= themes


def test_what_the_diagnosis_reads_is_wanted():
    """Signals as `vitals.NAME`, facts as an attribute of something called facts."""
    produced = {signal for kind in SENSORS for signal in kind.produces}
    read = set()
    for path in Path(diagnosis.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "vitals":
                read.add(getattr(signals, node.attr))
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith(("facts", "facts()")):
                read.add(f"facts.{node.attr}")
    assert {each for each in read if isinstance(each, str)} & produced <= WANTED


def recorded(tmp_path, monkeypatch, wanted):
    sink, model = MemorySink(), tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = {}

    class Chosen(Sensors):
        def __init__(self, watched, **_):
            super().__init__(watched, wanted)
            pipeline["sensors"] = self

    monkeypatch.setattr("sonde.watching.Sensors", Chosen)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise") as session:
        session.subscribe(sink)
        attached = {type(each) for each in pipeline["sensors"]._sensors}
        nn.functional.cross_entropy(model(torch.randn(4, 8)), torch.tensor([0, 1, 2, 3])).backward()
        optimizer.step()
    return attached, {key for key in sink.keys if ":vital." in key}


def test_only_wanted_sensors_are_attached(tmp_path, monkeypatch):
    attached, keys = recorded(tmp_path, monkeypatch, {signals.ROW_SUM, signals.FORWARDS})
    assert {kind.__name__ for kind in attached} == {"LossInputs", "PassCounts"}
    of_sensors = {key for key in keys if not key.startswith("(loop):vital.time_") and "step_time" not in key}
    assert "loss_fn:vital.row_sum" in of_sensors
    assert {key.rpartition(".")[2] for key in of_sensors} <= {
        *(signal for kind in attached for signal in kind.produces),
        "data_wait",
    }


def test_every_sensor_is_attached_by_default(tmp_path, monkeypatch):
    attached, _ = recorded(tmp_path, monkeypatch, None)
    assert attached == set(SENSORS)


def test_what_rules_and_views_want_needs_every_sensor_there_is():
    """A sensor that nobody wants any more can go."""
    unwanted = [kind.__name__ for kind in SENSORS if (WANTED | signals.SHOWN).isdisjoint(kind.produces)]
    assert not unwanted


def test_a_sensor_that_is_finished_is_called_no_more(tmp_path):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise") as session:
        sensors = session._pipeline._observer
        assert any(type(each).__name__ == "Written" for each in sensors._sensors)
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        assert not any(type(each).__name__ == "Written" for each in sensors._sensors)


@pytest.mark.parametrize(
    ("wanted", "rounds"), [({"facts.order"}, 2), ({"facts.softmaxes"}, 1), ({signals.FORWARDS}, 0), (None, 2)]
)
def test_all_leaf_modules_are_looked_at_only_as_long_as_a_sensor_asks(tmp_path, monkeypatch, wanted, rounds):
    class Chosen(Sensors):
        def __init__(self, watched, **_):
            super().__init__(watched, wanted)

    monkeypatch.setattr("sonde.watching.Sensors", Chosen)
    model, traced = tiny_mlp(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise") as session:
        for _ in range(4):
            traced.append(session._pipeline._observer.is_tracing)
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
    assert sum(traced) == rounds


def test_a_closed_session_holds_no_sensor_and_no_model(tmp_path):
    model = tiny_mlp()
    session = sonde.watch(model, run=tmp_path / "run")
    sensors = session._pipeline._observer
    session.close()
    assert not sensors._sensors
    assert not sensors._watched.models
    assert not sensors._context.watched.models
