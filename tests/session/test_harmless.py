"""What a watched program keeps: its stack, its dtype, its arguments checked in words; who resumes a run is decided."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from torch import nn

import sonde
from sonde.errors import OptionError, RunInUse
from sonde.testing import tiny_mlp


class Deep(nn.Module):
    """A model whose forward calls modules within modules, as deep as it is told."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.left = 0

    def forward(self, x):
        if self.left == 0:
            return self.layer(x)
        self.left -= 1
        return self(x)


def deepest(model):
    """Return how deep the model can call itself at the present recursion limit."""
    depth = 10
    while True:
        model.left = depth + 1
        try:
            model(torch.ones(1, 2))
        except RecursionError:
            return depth
        depth += 1


def test_a_model_that_calls_itself_to_the_recursion_limit_trains_when_it_is_watched(tmp_path):
    model = Deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(400)
    try:
        depth = deepest(model)
        with sonde.watch(model, optimizer, run=tmp_path / "run"):
            for _ in range(3):
                model.left = depth
                loss = model(torch.ones(1, 2)).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        assert sys.getrecursionlimit() == 400
    finally:
        sys.setrecursionlimit(limit)
    run = sonde.open_run(tmp_path / "run")
    assert not [event.message for event in run.events if event.event_type == "fault"]
    assert run.steps.tolist() == [0, 1, 2, 3]


def test_a_limit_that_the_program_sets_meanwhile_is_left_alone(tmp_path):
    limit = sys.getrecursionlimit()
    try:
        with sonde.watch(tiny_mlp(), run=tmp_path / "run"):
            sys.setrecursionlimit(limit + 1234)
        assert sys.getrecursionlimit() == limit + 1234
    finally:
        sys.setrecursionlimit(limit)


def test_a_default_dtype_of_float64_switches_nothing_off(tmp_path):
    torch.set_default_dtype(torch.float64)
    try:
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(model.parameters())
        with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
            for _ in range(6):
                loss = nn.functional.cross_entropy(model(torch.randn(4, 8)), torch.zeros(4, dtype=torch.long))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                session.log(loss=loss)
                session.record("scores", torch.randn(3))
    finally:
        torch.set_default_dtype(torch.float32)
    run = sonde.open_run(tmp_path / "run")
    assert not [event.data for event in run.events if event.event_type == "fault"]
    assert run.steps.tolist() == list(range(7))


@pytest.mark.parametrize("value", [10**400, 10**6000, type("Odd", (), {"__repr__": lambda self: 1 / 0})()], ids=type)
def test_a_number_that_cannot_be_logged_is_refused_in_words(tmp_path, value):
    with sonde.watch(tiny_mlp(), run=tmp_path / "run") as session:
        with pytest.raises(OptionError, match="takes a number or a tensor with one element"):
            session.log(x=value)
        with pytest.raises(TypeError, match="unexpected keyword"):
            session.record("x", [1.0], what=3)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_refused_in_words(tmp_path, layout):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    with sonde.watch(tiny_mlp(), run=tmp_path / "run") as session:
        for call in (lambda: session.record("scores", nested), lambda: session.log(scores=nested)):
            with pytest.raises(OptionError, match="takes no nested tensors; got one for 'scores'"):
                call()
    assert not [event for event in sonde.open_run(tmp_path / "run").events if event.event_type == "fault"]


def test_of_three_processes_that_resume_a_run_exactly_one_gets_it(tmp_path):
    with sonde.open_session(run=tmp_path / "run") as session:
        session.log(loss=1.0)
        session.step()
    for _ in range(5):
        start, release, (reading, writing) = os.pipe(), os.pipe(), os.pipe()
        children = [fork_resuming(tmp_path / "run", start, release, writing) for _ in range(3)]
        os.close(start[1])  # now: all at once
        answers = [os.read(reading, 1) for _ in children]
        os.close(release[1])  # all have answered: the one that has the run may let it go
        for pid in children:
            os.waitpid(pid, 0)
        for descriptor in (start[0], release[0], reading, writing):
            os.close(descriptor)
        assert sorted(answers) == [b"+", b"-", b"-"]
    assert sonde.verify(tmp_path / "run").ok


def fork_resuming(path, start, release, writing):
    """Fork a process that resumes a run when `start` ends, answers whether it got it, and closes it after `release`."""
    pid = os.fork()
    if pid:
        return pid
    answer = b"!"
    try:
        os.close(start[1])
        os.close(release[1])
        os.read(start[0], 1)
        session = sonde.open_session(run=path, resume=True)
        answer = b"+"
    except RunInUse:
        answer = b"-"
    finally:
        os.write(writing, answer)
        if answer == b"+":
            os.read(release[0], 1)
            session.close()
        os._exit(0)


def test_flush_is_false_if_something_was_dropped_since_the_last_time(tmp_path, monkeypatch):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:

        def step():
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            return session.flush()

        assert step()
        with monkeypatch.context() as full:
            full.setattr("sonde.store.log.room.Room.take", lambda *args, **kwargs: False)
            assert not step(), "nothing may be called written that was refused"
        assert step()
