"""What a watched program keeps: its stack, its dtype, its arguments checked in words; who resumes a run is decided."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import sonde
from sonde.errors import OptionError, RunInUse
from sonde.testing import assert_no_taps, tiny_mlp


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


def train(model, session, *, steps=4, batch=lambda: torch.randn(4, 8)):
    """Train a model, and return its weights."""
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    for _ in range(steps):
        loss = model(batch()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    return [each.detach().clone() for each in model.parameters()]


def faults(run):
    """Return what failed in Sonde while a run was recorded."""
    return [event.data for event in sonde.open_run(run).events if event.event_type == "fault"]


def a_part_of_itself():
    model = tiny_mlp()
    model._modules["again"] = nn.Sequential(nn.Identity())
    model.again._modules["parent"] = model
    model.forward = lambda x: model[2](model[1](model[0](x)))
    return model


def strange_names():
    return nn.Sequential(OrderedDict({"\x1b[31m": nn.Linear(8, 4), "\ud800": nn.Linear(4, 4), "a" * 5000: nn.ReLU()}))


@pytest.mark.parametrize("make", [a_part_of_itself, strange_names])
def test_a_model_of_an_unusual_shape_is_recorded(tmp_path, make):
    off = sonde.watch(tiny_mlp(), run=tmp_path / "off", enabled=False)
    torch.manual_seed(1)
    bare = train(make(), off)
    torch.manual_seed(1)
    model = make()
    with sonde.watch(model, run=tmp_path / "run") as session:
        session.tape()
        watched = train(model, session)
    assert all(torch.equal(*both) for both in zip(bare, watched, strict=True))
    assert not faults(tmp_path / "run")
    assert sonde.open_run(tmp_path / "run").steps.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
def test_an_evaluation_in_which_layers_return_nested_tensors_is_recorded(tmp_path):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with sonde.watch(model, run=tmp_path / "run") as session:
        for _ in range(4):
            train(model, session, steps=1, batch=lambda: torch.randn(2, 5, 8))
            model.eval()
            with torch.no_grad():
                model(torch.randn(2, 5, 8), src_key_padding_mask=padding)
            model.train()
    run = sonde.open_run(tmp_path / "run")
    assert not faults(tmp_path / "run")
    assert run.series("layers.0:output@eval", "count").values.tolist() == [8 * 8] * 4


def test_tensors_without_values_and_of_inference_mode_switch_nothing_off(tmp_path):
    model = tiny_mlp()
    with sonde.watch(model, run=tmp_path / "run") as session:
        with FakeTensorMode(allow_non_fake_inputs=True):
            session.log(fake=model(torch.ones(4, 8)).mean())
        train(model, session)
    assert not faults(tmp_path / "run")
    with torch.inference_mode():
        model = tiny_mlp()
        with sonde.watch(model, run=tmp_path / "inference") as session:
            session.log(mean=model(torch.ones(4, 8)).mean())
            session.step()
    assert not faults(tmp_path / "inference")


def test_a_program_that_changes_its_folder_records_in_one_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    model = tiny_mlp()
    with sonde.watch(model, run="run") as session:
        train(model, session)
        monkeypatch.chdir(tmp_path / "other")
        model(torch.ones(4, 8)).mean().backward()
        session.save_bundle()
        session.tape()
        train(model, session)
    assert not list((tmp_path / "other").iterdir())
    assert session.path == tmp_path / "run"
    assert sonde.verify(tmp_path / "run").ok


def test_a_forked_child_that_continues_the_program_is_not_stopped_by_the_session(tmp_path):
    with sonde.watch(tiny_mlp(), run=tmp_path / "run") as session:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                session.log(loss=1.0)
                session.event("note", "from the child")
                assert session.flush()
                assert "switched off" in repr(session)
                session.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
    assert sonde.verify(tmp_path / "run").ok
    assert [event for event in sonde.open_run(tmp_path / "run").events if event.event_type == "note"] == []


def test_a_session_that_another_thread_closes_leaves_no_mode_on_the_training_thread(tmp_path):
    model = tiny_mlp()
    session = sonde.watch(model, run=tmp_path / "run")
    train(model, session, steps=1)
    session.tape()
    train(model, session, steps=1)
    model(torch.ones(4, 8)).mean().backward()  # the step that is taped
    assert torch._C._len_torch_dispatch_stack() == 1
    closing = threading.Thread(target=session.close)
    closing.start()
    closing.join()
    model(torch.ones(4, 8))
    assert torch._C._len_torch_dispatch_stack() == 0
    assert_no_taps(model)


def test_an_exception_that_cannot_be_printed_is_noted_by_its_name(tmp_path):
    class Silent(Exception):
        def __str__(self):
            raise RuntimeError

    with pytest.raises(Silent), sonde.watch(tiny_mlp(), run=tmp_path / "run"):
        raise Silent
    assert not faults(tmp_path / "run")
    assert [each.message for each in sonde.open_run(tmp_path / "run").events if each.event_type == "exception"] == [
        "Silent"
    ]


def test_a_disk_that_refuses_a_bundle_is_reported_in_one_line(tmp_path, caplog):
    model = tiny_mlp()
    with sonde.watch(model, run=tmp_path / "run") as session:
        (tmp_path / "run/bundles").write_text("no folder")
        model(torch.ones(4, 8)).mean().backward()
        session.save_bundle()
    said = [each.getMessage() for each in caplog.records if "save_bundle" in each.getMessage()]
    assert len(said) == 1
    assert "Traceback" not in said[0]
    assert "Errno" in said[0]


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
            full.setattr("sonde.store.log.retention.Room.take", lambda *args, **kwargs: False)
            assert not step(), "nothing may be called written that was refused"
        assert step()


def test_a_model_of_inference_mode_switches_nothing_off(tmp_path):
    with torch.inference_mode():
        model = tiny_mlp()
        with sonde.watch(model, run=tmp_path / "run"):
            model(torch.ones(2, 8))
    assert not faults(tmp_path / "run")


def test_a_compiled_model_trains_where_warnings_are_errors(tmp_path):
    model = torch.nn.Linear(8, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = list(warnings.filters)
        compiled = torch.compile(model, backend="eager")
        with sonde.watch(model, run=tmp_path / "run"):
            for _ in range(2):
                compiled(torch.ones(4, 8)).mean().backward()
        assert warnings.filters == before
