from __future__ import annotations

import pytest
import torch
from patients import asked, patient
from programs import data, kinds, perceptron, train
from torch import nn

import sonde
from sonde.diagnosis.rules.activations import dead_relu


@pytest.mark.parametrize(("bias", "ill"), [(-100.0, True), (0.0, False)])
def test_a_layer_that_never_fires_is_found_where_it_is(tmp_path, bias, ill):
    model = perceptron()
    torch.nn.init.constant_(model[2].bias, bias)
    found = train(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.05), *data())
    assert (kinds(found, notes=False)[:1] == ["dead_relu"]) is ill
    if ill:
        assert found[0].severity == "critical"
        assert found[0].sites[:2] == ("2", "3")


def test_rectifiers_that_are_no_modules_are_seen_too(tmp_path):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = torch.nn.Linear(8, 16), torch.nn.Linear(16, 3)

        def forward(self, x):
            return self.last(torch.relu(self.first(x) - 100))

    class Dead(Net):
        def __init__(self):
            super().__init__()
            torch.nn.init.constant_(self.first.bias, -100.0)

        def forward(self, x):
            return self.last(torch.relu(self.first(x)))

    model = Dead()
    found = train(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.05), *data())
    assert "dead_relu" in kinds(found, notes=False)


def test_units_that_fire_rarely_are_alive(tmp_path):
    model = perceptron()
    torch.nn.init.constant_(model[2].bias, -1.0)
    found = train(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.05), *data())
    assert "dead_relu" not in kinds(found, notes=False)


def test_where_everything_has_vanished_rectifiers_are_not_reported(tmp_path):
    """Four hundred linear layers make zeros of anything, and have no rectifier among them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(400)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        for _ in range(30):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    assert "dead_relu" not in {finding.kind for finding in session.findings}


def units(active, samples):
    shares = [[1.0] * int(16 * active) + [0.0] * (16 - int(16 * active))] * 120
    return asked(dead_relu, patient({"act:vital.ever_active": shares, "act:vital.unit_samples": [samples] * 120}))


def test_a_layer_that_is_half_idle_is_worth_a_note():
    assert units(0.5, 5000).severity == "info"
    assert units(0.9, 5000) is None
    assert units(0.5, 350) is None
