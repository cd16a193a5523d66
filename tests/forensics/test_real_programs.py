"""Programs of other shapes: compiled, closures, autograd.grad, models that are never called whole."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sonde

PROGRAMS = sys.modules["forensics_programs"].PROGRAMS  # made known by conftest.py


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 1)

    def forward(self, x):
        return torch.log(self.fc(x) * (x[:, :1] > 0))  # BAD


@pytest.mark.filterwarnings("ignore:Using `torch.compile")  # torch's, about hooks in general
def test_a_compiled_model_is_repeated_as_it_was_written(reported):
    def run(watch):
        model = torch.compile(Net(), backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with watch(model, optimizer):
            loss = model(-torch.ones(2, 3)).sum()
            loss.backward()
            optimizer.step()

    (finding,) = reported(run)
    assert finding.kind == "nan_forward"
    assert finding.data["origin"]["line"]["text"].endswith("# BAD")
    torch.compiler.reset()


def test_a_closure_is_left_to_the_optimizer(reported):
    def run(watch):
        model = nn.Linear(3, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
        x = torch.rand(4, 3)

        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), torch.ones(4, 1))
            loss.backward()
            return loss

        with watch(model, optimizer):
            before = closure().item()
            for _ in range(3):
                optimizer.step(closure)
            assert closure().item() < before

    assert reported(run, guard="skip") == []


def test_a_model_that_is_never_called_whole_is_judged_by_its_graph(reported):
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 1)

        def training_step(self, x):
            p = torch.relu(self.fc(x)) * 0
            return torch.log(p).mean()  # here

    def run(watch):
        model = Parts()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with watch(model, optimizer):
            loss = model.training_step(torch.ones(2, 3))
            loss.backward()
            optimizer.step()

    (finding,) = reported(run)
    assert (finding.kind, finding.data["reason"]) == ("nan_in_loss", "log_of_zero")
    assert finding.data["origin"]["line"]["text"] == "return torch.log(p).mean()  # here"


def test_gradients_by_hand_are_judged_before_the_step(reported):
    def run(watch):
        model = nn.Linear(3, 2, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with watch(model, optimizer):
            loss = torch.sqrt(model(torch.zeros(2, 3)).pow(2).sum())
            (model.weight.grad,) = torch.autograd.grad(loss, [model.weight])
            optimizer.step()

    (finding,) = reported(run)
    assert finding.kind == "nan_backward"


def test_a_model_that_cannot_be_repeated_is_named_and_training_goes_on(tmp_path):
    class Once(Net):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls > 1:
                raise RuntimeError("only once")
            return super().forward(x)

    model = Once()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sonde.watch(model, optimizer, run=tmp_path / "run"):
        model(-torch.ones(2, 3)).sum().backward()
        optimizer.step()
    faults = [event for event in sonde.open_run(tmp_path / "run").events if event.event_type == "fault"]
    assert len(faults) == 1
    assert "only once" in faults[0].data["traceback"]


@pytest.mark.parametrize("name", ["log_of_zero", "sqrt_backward"])
def test_the_last_steps_are_reported(name, reported):
    (finding,) = reported(PROGRAMS[name].run)
    history = finding.data.get("last_steps", [])
    assert all(entry["nonfinite"] == 0 for entry in history if entry["step"] < finding.step)


def test_diagnose_false_attaches_neither_sensors_nor_forensics(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run", diagnose=False) as session:
        # Only where a backward pass ends is noted: steps that no optimizer takes show in the weights there.
        assert session._pipeline.forensics._handles == []
        assert session._pipeline._observer is None
        (model(torch.ones(1, 2)) * float("nan")).sum().backward()
        optimizer.step()
    assert not (tmp_path / "run" / "bundles").exists()
