"""A session without a model records what it is handed."""

from __future__ import annotations

import torch

import sonde
from sonde.records import Reading
from sonde.testing import assert_no_taps


def test_what_is_handed_in_can_be_read_step_by_step(tmp_path):
    with sonde.open_session(run=tmp_path / "run", config={"why": "notes"}) as session:
        session.event("begun", "before the first step")
        for step in range(1, 4):
            session.record("layer", Reading.of([float(step)]), quantity="gradient")
            session.record("tensor", torch.full((2,), float(step)))
            session.log(loss=1 / step)
            session.step()
        assert_no_taps()
    run = sonde.open_run(tmp_path / "run")
    assert run.series("layer:gradient", "mean").values.tolist() == [1, 2, 3]
    assert run.series("tensor:value", "count").values.tolist() == [2, 2, 2]
    assert run.series("loss:scalar", "mean").steps.tolist() == [1, 2, 3]
    assert [(event.event_type, event.step) for event in run.events] == [("begun", 0)]
    assert run.header.config["user"] == {"why": "notes"}


def test_an_event_can_be_read_while_the_session_is_open(tmp_path):
    with sonde.open_session(run=tmp_path / "run") as session:
        session.event("seen", "at once")
        assert session.flush()
        assert [event.message for event in sonde.open_run(tmp_path / "run").events] == ["at once"]


def test_a_run_can_be_continued(tmp_path):
    for number in (1, 2):
        with sonde.open_session(run=tmp_path / "run", resume=number == 2) as session:
            session.log(x=number)
            session.step()
    assert sonde.open_run(tmp_path / "run").series("x:scalar", "mean").values.tolist() == [1, 2]
