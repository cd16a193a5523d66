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


def test_step_by_hand_is_refused_where_an_optimizer_steps(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        with pytest.raises(OptionError, match=r"optimizer\.step"):
            session.step()


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


def test_a_run_that_this_process_still_writes_is_told_apart(tmp_path):
    with (
        sonde.watch(nn.Linear(2, 2), run=tmp_path / "run"),
        pytest.raises(RunInUse, match="by a session of this process"),
    ):
        sonde.watch(nn.Linear(2, 2), run=tmp_path / "run")
