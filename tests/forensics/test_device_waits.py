"""On a device nothing is read that need not be: not while a graph is captured, and not one tensor after the other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sonde
from sonde.forensics import watcher
from sonde.forensics.values import any_nonfinite, badness


def deep(layers=20):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class Reads:
    """Counts the looks at tensors that would each wait for a device."""

    def __init__(self, monkeypatch):
        self.each = self.together = 0
        monkeypatch.setattr(watcher, "badness", self._badness)
        monkeypatch.setattr(watcher, "any_nonfinite", self._any)

    def _badness(self, value):
        self.each += 1
        return badness(value)

    def _any(self, tensors):
        self.together += 1
        return any_nonfinite(tensors)


@pytest.fixture
def reads(monkeypatch):
    return Reads(monkeypatch)


@pytest.mark.usefixtures("as_if_on_a_device")
@pytest.mark.parametrize("guard", [None, "stop_late"])
def test_while_all_is_well_nothing_is_read(guard, tmp_path, reads):
    model, optimizer = deep()
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise", guard=guard) as session:
        for _ in range(3):
            model(torch.rand(2, 3)).sum().backward()
            optimizer.step()
            session.flush()
    assert (reads.each, reads.together) == (0, 0)


@pytest.mark.usefixtures("as_if_on_a_device")
def test_when_armed_a_step_waits_once_for_all_gradients_and_once_for_all_parameters(tmp_path, reads):
    model, optimizer = deep()
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise") as session:
        model(torch.rand(2, 3)).sum().backward()
        model[0].weight.grad[0, 0] = float("nan")
        optimizer.step()
        with torch.no_grad():
            model[0].weight.fill_(0.1)  # somebody mends it
        assert session.flush()
        before = reads.each, reads.together
        optimizer.zero_grad()
        model(torch.rand(2, 3)).sum().backward()
        optimizer.step()
        each, together = reads.each - before[0], reads.together - before[1]
    assert each == 1  # the loss
    assert together == 2


@pytest.mark.usefixtures("as_if_on_a_device")
def test_when_all_has_been_reported_nothing_is_read_any_more(tmp_path, reads):
    model, optimizer = deep(2)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise") as session:
        session._pipeline.forensics.watcher._left = 0
        for _ in range(3):
            model(torch.full((2, 3), float("nan"))).sum().backward()
            optimizer.step()
            session.flush()
        assert session._pipeline.forensics.watcher.recent.bad_step is not None
    assert (reads.each, reads.together) == (0, 0)


@pytest.mark.parametrize("guard", [None, "skip", "stop", "stop_late"])
def test_while_a_graph_is_captured_nothing_is_looked_at_or_kept(guard, tmp_path, reads, monkeypatch):
    model, optimizer = deep(2)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise", guard=guard) as session:
        found = session._pipeline.forensics.watcher
        found.recent.bad_step = 1  # armed
        monkeypatch.setattr(watcher, "is_capturing", lambda: True)
        loss = model(torch.full((2, 3), float("nan"))).sum()
        loss.backward()
        found.before_step(optimizer)
        found.after_step(optimizer)
        found.after_skip()
        assert not found.keeper.passes
        assert not found._tails._tails
        assert not found.hold_back.is_holding
        monkeypatch.setattr(watcher, "is_capturing", lambda: False)
        found.recent.forget_bad()
    assert (reads.each, reads.together) == (0, 0)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace`:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_backward_that_is_traced_is_not_looked_at(tmp_path, reads):
    """Not a CUDA graph, but the same answer of `is_capturing`, without any pretence."""
    model, optimizer = deep(2)

    def program(x, scale):
        loss = (x * scale).sum()
        torch.autograd.backward(loss)
        return loss.detach()

    given = torch.full((2, 3), float("nan")), torch.ones(3, requires_grad=True)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise"):
        torch.jit.trace(program, given, check_trace=False)
        assert reads.each == 0
        program(*given)
        assert reads.each == 1


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ([], 0),
        ([torch.zeros(0)], 0),
        ([torch.ones(3), torch.full((2, 2), 3e38)], 0),
        ([torch.full((5,), 60000.0, dtype=torch.float16), torch.ones(2, dtype=torch.float64)], 0),
        ([torch.ones(3), torch.tensor([1.0, float("nan")])], 1),
        ([torch.tensor([-float("inf")], dtype=torch.bfloat16), torch.ones(2)], 1),
        ([torch.sparse_coo_tensor([[0]], [float("nan")], (3,), check_invariants=True), torch.ones(2)], 1),
        ([torch.ones(3, dtype=torch.int64), torch.ones(2)], 0),
        ([torch.ones(3, device="meta")], 0),
        ([torch.tensor([1 + 2j, complex(float("nan"), 0)])], 1),
    ],
)
def test_all_tensors_are_asked_at_once(tensors, expected):
    assert float(any_nonfinite(tensors)) == expected
