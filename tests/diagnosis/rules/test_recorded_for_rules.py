"""The few signs that only these rules read are recorded as the rules take them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import sonde
from sonde.testing import tiny_mlp


def record(path, loss_of, *, passes=1):
    torch.manual_seed(0)
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=path):
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(passes):
                x = torch.randn(16, 8)
                loss_of(model(x), x[:, :4].argmax(1)).backward()
            optimizer.step()
    return sonde.open_run(path)


@pytest.mark.parametrize("factor", [1.0, 0.25, -1.0])
def test_the_number_that_backward_was_called_on_is_recorded(tmp_path, factor):
    run = record(tmp_path / "run", lambda out, y: F.cross_entropy(out, y) * factor, passes=2)
    roots = run.series("(loop):vital.root", "mean").values
    losses = run.series("loss_fn:output", "mean").values
    assert roots == pytest.approx(losses * factor, rel=1e-6)


@pytest.mark.parametrize("dim", [0, 1])
def test_the_log_sums_of_log_probabilities_are_recorded_both_ways(tmp_path, dim):
    run = record(tmp_path / "run", lambda out, y: F.nll_loss(F.log_softmax(out, dim), y))
    across = run.series("loss_fn:vital.log_z", "abs_max").values
    down = run.series("loss_fn:vital.column_log_z", "abs_max").values
    normalised, other = (down, across) if dim == 0 else (across, down)
    assert normalised == pytest.approx(0, abs=1e-5)
    assert (other > 0.1).all()


def test_losses_of_two_kinds_that_take_turns_do_not_share_a_site(tmp_path):
    torch.manual_seed(0)
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run"):
        for step in range(6):
            x = torch.randn(16, 8)
            out = model(x)
            loss = F.mse_loss(out, 100 * x[:, :4]) if step % 2 else F.cross_entropy(out, x[:, :4].argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    run = sonde.open_run(tmp_path / "run")
    assert run.site("loss_fn:input.target").kind == "cross_entropy"
    assert run.site("loss_fn:input.target#1").kind == "mse_loss"
    assert run.series("loss_fn:input.target", "max").values.max() <= 3
    assert run.series("loss_fn:input.target", "max").steps.tolist() == [1, 3, 5]


class Noisy(torch.nn.Module):
    def __init__(self, functional):
        super().__init__()
        self.fc, self.drop, self.functional = torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), functional

    def forward(self, x):
        return F.dropout(self.fc(x), 0.5) if self.functional else self.drop(self.fc(x))


@pytest.mark.parametrize("functional", [True, False])
def test_values_that_a_function_drops_in_evaluation_are_recorded_and_those_of_modules_are_not(tmp_path, functional):
    model = Noisy(functional)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            model.drop.train()  # sampling
            with torch.no_grad():
                model(torch.ones(2, 4))
            model.train()
    found = [finding.kind for finding in session.findings if finding.kind == "dropout_ignores_mode"]
    assert bool(found) is functional
    assert F.dropout.__name__ == "dropout"
    assert not hasattr(F.dropout, "__wrapped__")
