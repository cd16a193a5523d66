"""If anything fails in Sonde or on disk, training continues with one warning, and the run names what is missing."""

from __future__ import annotations

import shutil
import threading

import pytest
import torch
from tests.session.endings import ending_of
from tests.waiting import PATIENCE_S

import sonde
from sonde.errors import RunError
from sonde.store import RunWriter, lines
from sonde.testing import MemorySink, tiny_mlp


def train(model, optimizer, steps, session=None):
    for _ in range(steps):
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if session is not None:
            session.log(loss=loss)


@pytest.fixture
def setup():
    torch.manual_seed(0)
    model = tiny_mlp()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_an_exception_in_the_loop_is_noted_and_goes_through(setup, tmp_path):
    model, optimizer = setup
    with pytest.raises(ZeroDivisionError), sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        train(model, optimizer, 2, session)
        1 / 0  # noqa: B018
    run = sonde.open_run(tmp_path / "run")
    assert run.status == "failed"
    assert run.steps.tolist() == [0, 1, 2]
    event = ending_of(run)
    assert event.event_type == "exception"
    assert "ZeroDivisionError" in event.message
    assert "1 / 0" in event.data["traceback"]


def test_a_keyboard_interrupt_is_noted_and_goes_through(setup, tmp_path):
    model, optimizer = setup
    with pytest.raises(KeyboardInterrupt), sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        train(model, optimizer, 2, session)
        raise KeyboardInterrupt
    run = sonde.open_run(tmp_path / "run")
    assert run.status == "interrupted"
    assert run.steps.tolist() == [0, 1, 2]
    assert (ending_of(run).event_type, ending_of(run).message) == ("interrupted", "KeyboardInterrupt")
    assert "raise KeyboardInterrupt" in ending_of(run).data["traceback"]


def test_a_sink_that_raises_is_left_out_and_named(setup, tmp_path, caplog):
    class Bad(MemorySink):
        def take_block(self, block):
            raise ValueError("planted")

    model, optimizer = setup
    good = MemorySink()
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        session.subscribe(Bad())
        session.subscribe(good)
        train(model, optimizer, 5, session)
    assert len(good.blocks) == 6
    assert good.closed
    assert caplog.text.count("sink Bad failed") == 1
    run = sonde.open_run(tmp_path / "run")
    assert len(run.steps) == 6
    fault = next(event for event in run.events if event.event_type == "fault")
    assert "planted" in fault.data["traceback"]


def test_a_sink_that_comes_late_learns_of_the_sites(setup, tmp_path):
    model, optimizer = setup
    late = MemorySink()
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        train(model, optimizer, 2, session)
        session.flush()
        session.subscribe(late)
        train(model, optimizer, 1, session)
    assert "0.weight:gradient" in late.keys


def test_a_deleted_folder_costs_a_warning_not_the_run(setup, tmp_path, caplog):
    model, optimizer = setup
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        train(model, optimizer, 2, session)
        session.flush()
        shutil.rmtree(tmp_path / "run")
        train(model, optimizer, 3, session)
        session.flush()
    assert caplog.text.count("writing the run failed") == 1
    assert session.current_step == 5


def test_a_full_disk_costs_a_warning_and_the_run_says_what_is_missing(setup, tmp_path, caplog, monkeypatch):
    import errno

    model, optimizer = setup
    full = threading.Event()
    write = lines.os.write

    def limited(descriptor, data):
        if full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        train(model, optimizer, 2, session)
        session.flush()
        monkeypatch.setattr(lines.os, "write", limited)
        full.set()
        train(model, optimizer, 3, session)
        session.flush()
        full.clear()
        train(model, optimizer, 2, session)
    assert caplog.text.count("writing the run failed") == 1
    assert "No space left" in caplog.text
    run = sonde.open_run(tmp_path / "run")
    assert run.steps.tolist()[:3] == [0, 1, 2]
    assert 7 in run.steps.tolist()
    assert run.dropped > 0
    assert sonde.verify(tmp_path / "run").ok


def test_a_folder_that_cannot_be_made_is_refused_at_once(setup, tmp_path):
    model, optimizer = setup
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="file"):
        sonde.watch(model, optimizer, run=tmp_path / "file" / "run")


def test_steps_are_dropped_counted_and_reported_when_the_writer_lags(setup, tmp_path, monkeypatch):
    model, optimizer = setup
    gate = threading.Event()
    take = RunWriter.take_block

    def slow(self, block):
        gate.wait(PATIENCE_S)
        take(self, block)

    monkeypatch.setattr(RunWriter, "take_block", slow)
    # One arena is about 60 KB here, so 1 MiB / 4 holds only a few steps.
    with sonde.watch(model, optimizer, run=tmp_path / "run", max_memory_mb=1) as session:
        train(model, optimizer, 200, session)
        dropped = session.dropped_steps
        assert dropped > 0
        gate.set()
        for _ in range(12):
            session.flush()
            train(model, optimizer, 1, session)
        assert session._pipeline.packer.stride == 1, "it recovers"
    run = sonde.open_run(tmp_path / "run")
    told = [event for event in run.events if event.event_type == "steps_dropped"]
    assert sum(event.data["steps"] for event in told) == session.dropped_steps
    assert len(run.series("loss:scalar", "mean").steps) == 212  # logged numbers need no room of the recorder
    assert len(run.series("0.weight:gradient", "norm").steps) <= 212 - dropped


def test_updates_that_do_not_fit_the_memory_are_left_out_and_reported(tmp_path, caplog):
    model = tiny_mlp(512, 1024, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run", max_memory_mb=2) as session:
        model(torch.randn(2, 512)).sum().backward()
        optimizer.step()
        session.flush()
    run = sonde.open_run(tmp_path / "run")
    keys = {site.key for site in run.sites}
    assert "2.weight:update" in keys
    assert "0.weight:update" not in keys
    assert "0.weight:parameter" in keys
    assert "updates of 1 parameter(s) are not recorded (0.weight)" in caplog.text


@pytest.mark.parametrize("part", ["_log_plain", "_log"])
def test_a_fault_in_a_log_of_numbers_costs_a_warning(tmp_path, caplog, monkeypatch, part):
    session = sonde.watch(tiny_mlp(), run=tmp_path / "run")
    session.log(loss=1.0)

    def fail(*args):
        raise RuntimeError("broken")

    monkeypatch.setattr(session, part, fail)
    session.log(loss=2.0)
    session.log({"loss/of it": 2.0})
    session.close()
    assert "session.log failed" in caplog.text
