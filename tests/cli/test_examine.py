"""Examining a run from the command line, and by itself: a process of its own measures, the diagnosis reads it."""

import json

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F
from tests.diagnosis.rules.handmade import patient
from torch import nn

import sonde as library
from sonde.core import examination, tape
from sonde.diagnosis.examiner import Examiner
from sonde.forensics import experiments


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose weight decay keeps it from learning, with its tapes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=30.0)
    path = tmp_path_factory.mktemp("runs") / "run"
    with library.watch(model, optimizer, run=path, diagnose=True) as session:
        for _ in range(30):
            x = torch.randn(32, 20)
            loss = F.cross_entropy(model(x), x[:, :5].argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return path


def test_a_run_is_examined_in_a_process_of_its_own_and_diagnosed_by_it(sonde, run):
    answer = sonde("examine", run, "--only", "learnability", "--json")
    assert answer.exit_code == 0, answer.output
    (result,) = json.loads(answer.stdout)["results"]
    assert result["numbers"]["skill.as is"] < 0.1
    assert result["numbers"]["skill.no weight decay"] > 0.5
    found = next(each for each in library.diagnose(run).findings if each.kind == "weight_decay_too_large")
    assert found.basis == "experiment"
    answer = sonde("diagnose", run, "--no-examine", "--json")
    assert "no weight decay" in json.dumps(json.loads(answer.stdout)["findings"])


def test_an_unknown_step_and_a_run_without_tapes_are_errors(sonde, run, first):
    assert sonde("examine", run, "--step", "999").exit_code == 2
    assert sonde("examine", first).exit_code == 2


def test_an_experiment_that_does_not_exist_is_refused_with_those_that_do(sonde, run):
    answer = sonde("examine", run, "--only", "learning")
    assert answer.exit_code
    assert "no experiment 'learning'" in answer.output
    assert all(name in " ".join(answer.output.split()) for name in examination.EXPERIMENTS)
    assert tuple(experiments.EXPERIMENTS) == examination.EXPERIMENTS


def test_a_run_that_looks_ill_is_examined_by_itself_and_a_healthy_one_is_not(run, monkeypatch):
    for folder in tape.folders(run).values():
        (folder / examination.NAME).unlink(missing_ok=True)
    monkeypatch.setenv("SONDE_EXAMINE", "wait")
    well = patient({"loss:scalar": list(np.linspace(2.0, 0.1, 40))})
    assert not Examiner(run).finish(well, [])
    assert not well.examinations
    monkeypatch.setenv("SONDE_EXAMINE", "0")
    ill = patient({"loss:scalar": [2.0] * 40})
    assert not Examiner(run).finish(ill, [])
    monkeypatch.setenv("SONDE_EXAMINE", "1")
    started = []
    monkeypatch.setattr(examination, "start", lambda folder, **_: started.append(folder) or Finished())
    examiner = Examiner(run)
    for _ in range(5):
        examiner.look(ill, [])
    folders = list(tape.folders(run).values())
    assert started == [folders[0], folders[-1]]


class Finished:
    """A process that has ended."""

    def poll(self):
        return 0
