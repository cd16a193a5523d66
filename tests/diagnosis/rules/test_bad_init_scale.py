from __future__ import annotations

import pytest
import torch
from programs import data, kinds, perceptron, train


@pytest.mark.parametrize(("std", "ill"), [(8.0, True), (1e-4, True), (0.25, False)])
def test_weights_that_begin_far_off_are_found(tmp_path, std, ill):
    model = perceptron(torch.nn.Tanh)
    for layer in (model[0], model[2], model[4]):
        torch.nn.init.normal_(layer.weight, std=std)
        torch.nn.init.zeros_(layer.bias)
    found = train(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.05), *data(), steps=40)
    assert ("bad_init_scale" in kinds(found)) is ill


def deep(gain):
    layers = [torch.nn.Linear(16, 16) for _ in range(7)]
    if gain is not None:
        for layer in layers:
            torch.nn.init.normal_(layer.weight, std=gain / 4)
            torch.nn.init.zeros_(layer.bias)
    hidden = [each for layer in layers for each in (layer, torch.nn.ReLU())]
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), *hidden, torch.nn.Linear(16, 3))


@pytest.mark.parametrize(("gain", "ill"), [(0.2, True), (1.41, False), (None, False)])
def test_gains_that_are_small_only_together_are_found(tmp_path, gain, ill):
    torch.manual_seed(0)
    model = deep(gain)
    found = train(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.02), *data(), steps=40)
    assert ("bad_init_scale" in kinds(found)) is ill
