"""What a wrong call is answered with: an error that names the culprit, the state and the cure."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sonde
from sonde.errors import ClosedError, OptionError, RunError, RunExists, RunInUse, SelectionError
from sonde.testing import tiny_mlp


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"where": "0.wieght"}, SelectionError, "nearest: 0.weight"),
        ({"where": "kind:Liner"}, SelectionError, "nearest: Linear"),
        ({"where": "re:(("}, SelectionError, "not a regular expression"),
        ({"where": []}, SelectionError, "selects nothing"),
        ({"where": 3}, SelectionError, "got int"),
        ({"what": ["grads"]}, OptionError, "choose from parameters, gradients"),
        ({"what": []}, OptionError, "choose from"),
        ({"every": 0}, OptionError, "at least 1; got 0"),
        ({"every": "often"}, OptionError, "Try every"),
        ({"on_error": "ignore"}, OptionError, "'isolate' or 'raise'"),
        ({"max_memory_mb": 0}, OptionError, "max_memory_mb"),
        ({"max_disk_mb": -1}, OptionError, "max_disk_mb"),
        ({"max_calls": 0}, OptionError, "max_calls"),
        ({"optimizer": "sgd"}, OptionError, "optimizer takes torch optimizers"),
        (
            {"optimizer": torch.optim.SGD},
            OptionError,
            "optimizer takes torch optimizers; got type",
        ),
        ({"what": None}, OptionError, "choose from"),
        ({"max_calls": None}, OptionError, "max_calls takes a whole number of at least 1; got None"),
        ({"max_memory_mb": "many"}, OptionError, "max_memory_mb takes a whole number"),
        ({"max_disk_mb": float("inf")}, OptionError, "max_disk_mb takes a whole number"),
        ({"config": 3}, OptionError, "config takes a dict; got int: 3"),
        ({"rank": -1}, OptionError, "rank takes a whole number of at least 0; got -1"),
        ({"rank": "first"}, OptionError, "rank takes a whole number of at least 0; got 'first'"),
        ({"start_step": 5}, OptionError, "start_step=5 is for a run that is resumed: pass resume=True"),
        ({"start_step": -4, "resume": True}, OptionError, "start_step takes a whole number of at least 1; got -4"),
        ({"loss_fn": "mse"}, OptionError, "loss_fn takes a function or a module; got 'mse'"),
        ({"loader": "train"}, OptionError, "loader takes what the loop iterates over"),
        ({"loader": 3}, OptionError, "loader takes what the loop iterates over"),
        ({"scheduler": [1]}, OptionError, r"scheduler takes a learning-rate scheduler; list has no step\(\)"),
        ({"scaler": 3}, OptionError, r"scaler takes a torch.amp.GradScaler; int has no is_enabled\(\)"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_attached(tmp_path, options, error, says):
    with pytest.raises(error, match=says):
        sonde.watch(tiny_mlp(), run=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("model", [None, torch.ones(3), {}, {"a": 1}, lambda x: x])
def test_what_is_not_a_model_is_refused(tmp_path, model):
    with pytest.raises(OptionError, match=r"watch\(\)"):
        sonde.watch(model, run=tmp_path / "run")


def test_a_closed_session_says_so(tmp_path):
    session = sonde.watch(tiny_mlp(), run=tmp_path / "run")
    session.close()
    session.close()
    for verb in (
        lambda: session.log(loss=1),
        lambda: session.record("a", [1]),
        lambda: session.event("a"),
        session.step,
    ):
        with pytest.raises(ClosedError, match="closed session"):
            verb()
    with pytest.raises(ClosedError, match=r"sonde\.watch again"):
        session.flush()


def test_log_refuses_what_is_not_one_number(tmp_path):
    with sonde.watch(tiny_mlp(), run=tmp_path / "run") as session:
        with pytest.raises(OptionError, match=r"shape \(3,\).*session.record"):
            session.log(loss=torch.ones(3))
        with pytest.raises(OptionError, match="'high'"):
            session.log(loss="high")
        with pytest.raises(OptionError, match="list of numbers"):
            session.record("a", ["x"])


def test_a_run_that_exists_is_not_overwritten_but_can_be_resumed(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(steps, **options):
        with sonde.watch(model, optimizer, run=tmp_path / "run", **options) as session:
            for _ in range(steps):
                loss = model(torch.ones(1, 2)).sum()
                loss.backward()
                optimizer.step()
                session.log(loss=loss)

    train(3)
    before = sonde.open_run(tmp_path / "run").series("loss:scalar", "mean").values.tolist()
    with pytest.raises(RunExists, match="resume=True"):
        train(1)
    train(2, resume=True)
    run = sonde.open_run(tmp_path / "run")
    assert run.steps.tolist() == [0, 1, 2, 3, 4, 5]
    assert run.series("loss:scalar", "mean").values.tolist()[:3] == before
    assert run.series("weight:update", "norm").steps.tolist() == [1, 2, 3, 4, 5]
    train(4, resume=True, start_step=3)
    run = sonde.open_run(tmp_path / "run")
    assert run.steps.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert run.series("loss:scalar", "mean").values.tolist()[:2] == before[:2]


def test_a_path_in_use_by_a_live_run_is_refused(tmp_path):
    with sonde.watch(tiny_mlp(), run=tmp_path / "run"), pytest.raises(RunInUse, match="process"):
        sonde.watch(tiny_mlp(), run=tmp_path / "run", resume=True)


def test_a_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "run").write_text("hello")
    with pytest.raises(RunError, match="run"):
        sonde.watch(tiny_mlp(), run=tmp_path / "run")
    assert (tmp_path / "run").read_text() == "hello"


def test_a_wrong_option_leaves_no_run_behind(tmp_path):
    with pytest.raises(OptionError, match="guard='halt'"):
        sonde.watch(nn.Linear(2, 2), run=tmp_path / "run", guard="halt")
    assert not (tmp_path / "run").exists()


def test_a_program_that_is_started_again_numbers_its_runs(tmp_path):
    paths = []
    for _ in range(2):
        with sonde.watch(nn.Linear(2, 2), run=tmp_path / "again-*") as session:
            paths.append(session.path.name)
    assert paths == ["again-1", "again-2"]
    with pytest.raises(RunExists, match=r"again-1-\*' takes the next free number"):
        sonde.watch(nn.Linear(2, 2), run=tmp_path / "again-1")


def test_a_run_that_this_process_still_writes_is_distinguished(tmp_path):
    with (
        sonde.watch(nn.Linear(2, 2), run=tmp_path / "run"),
        pytest.raises(RunInUse, match="by a session of this process"),
    ):
        sonde.watch(nn.Linear(2, 2), run=tmp_path / "run")


@pytest.mark.parametrize("run", [None, "", " ", 5])
def test_a_run_without_a_name_is_refused_and_nothing_is_written(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match='run takes the folder to write, such as "runs/first"; got'):
        sonde.watch(tiny_mlp(), run=run)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named_with_the_reason():
    with pytest.raises(RunError, match=r"cannot be written to /proc/none/run: .+\. Choose a folder that you may write"):
        sonde.watch(tiny_mlp(), run="/proc/none/run", on_error="raise")


def test_a_folder_that_cannot_be_written_costs_the_recording_and_not_the_training(caplog):
    model = tiny_mlp()
    with sonde.watch(model, run="/proc/none/run") as session:
        session.log(loss=model(torch.ones(2, 8)).sum())
        session.step()
    assert "NOTHING IS RECORDED in /proc/none/run" in caplog.text
    assert "cannot be written to /proc/none/run" in caplog.text
    assert "could not be recorded" in repr(session)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda session: session.record(3, [1.0]),
            "takes a string for where the values are from, such as 'scores'; got 3",
        ),
        (lambda session: session.record("x", [1.0], quantity="grad"), "has no quantity 'grad': choose from parameter,"),
        (lambda session: session.record("x", None), "takes a tensor, array or list of numbers; got NoneType"),
        (lambda session: session.event(3), "takes a string for what happened, such as 'note'; got 3"),
        (lambda session: session.event("x", "y", [1]), r"event\(data=...\) takes a dict; got list"),
        (lambda session: session.save_bundle(3), "takes a string for the reason; got 3"),
        (lambda session: session.epoch("one"), r"epoch\(...\) takes a whole number of at least 0; got 'one'"),
        (lambda session: session.epoch(1.5), "at least 0; got 1.5"),
        (lambda session: session.epoch(10**30), "takes a whole number up to 2147483647; got 1000"),
        (lambda session: session.epoch(torch.tensor(1j)), "takes a whole number of at least 0; got tensor"),
        (lambda session: session.step(10**300), "takes a whole number up to 9007199254740992; got 1000"),
        (lambda session: session.log(x=torch.tensor(1j)), "takes real numbers; this tensor is complex"),
        (lambda session: session.record("x", 10**400), "takes a tensor, array or list of numbers; got int"),
        (lambda session: session.subscribe(3), r"takes a sink, .*; int has no take_sites\(\)"),
    ],
)
def test_what_a_verb_cannot_take_is_named_and_the_session_goes_on(tmp_path, call, says):
    with sonde.watch(tiny_mlp(), run=tmp_path / "run") as session:
        with pytest.raises(OptionError, match=says):
            call(session)
        session.log(loss=1.0)
    assert sonde.open_run(tmp_path / "run").status == "finished"


def test_a_session_that_is_closed_is_not_entered_again(tmp_path):
    session = sonde.watch(tiny_mlp(), run=tmp_path / "run")
    session.close()
    with pytest.raises(ClosedError, match=r"The session of .*run is closed\. Call sonde\.watch again"), session:
        pass


def test_a_session_that_is_switched_off_needs_no_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with sonde.watch(tiny_mlp(), run=None, enabled=False) as session:
        session.log(loss=1.0)
    assert not list(tmp_path.iterdir())
