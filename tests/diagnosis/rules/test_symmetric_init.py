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
