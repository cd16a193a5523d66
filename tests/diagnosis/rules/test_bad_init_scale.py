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
