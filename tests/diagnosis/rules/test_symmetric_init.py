from __future__ import annotations

import pytest
import torch
from programs import data, kinds, perceptron, train


@pytest.mark.parametrize("ill", [True, False])
def test_units_that_begin_alike_are_found(tmp_path, ill):
    model = perceptron()
    for layer in (model[0], model[2], model[4]):
        torch.nn.init.constant_(layer.weight, 0.05) if ill else torch.nn.init.xavier_uniform_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    found = train(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.05), *data(), steps=30)
    assert ("symmetric_init" in kinds(found, notes=False)) is ill


def test_a_head_of_zeros_is_how_some_begin(tmp_path):
    model = perceptron()
    torch.nn.init.zeros_(model[4].weight)
    found = train(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.05), *data(), steps=30)
    assert "symmetric_init" not in kinds(found)


class NoisyLinear(torch.nn.Linear):
    """A layer whose weights are drawn around means that differ, with deviations that begin alike."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.deviation = torch.nn.Parameter(torch.full((outputs, inputs), 0.02))

    def forward(self, x):
        weight = self.weight + self.deviation * torch.randn_like(self.weight)
        return torch.nn.functional.linear(x, weight, self.bias)


@pytest.mark.parametrize("ill", [True, False])
def test_deviations_that_begin_alike_beside_means_that_differ_are_well(tmp_path, ill):
    torch.manual_seed(0)
    model = torch.nn.Sequential(NoisyLinear(8, 16), torch.nn.ReLU(), NoisyLinear(16, 3))
    for layer in (model[0], model[2]) if ill else ():
        torch.nn.init.constant_(layer.weight, 0.05)
    found = train(tmp_path, model, torch.optim.SGD(model.parameters(), lr=1e-4), *data(), steps=30)
    assert ("symmetric_init" in kinds(found, notes=False)) is ill
