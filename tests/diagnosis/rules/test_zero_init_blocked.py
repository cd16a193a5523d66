from __future__ import annotations

import pytest
import torch
from programs import data, kinds, perceptron, train


@pytest.mark.parametrize(("factors", "ill"), [((2, 4), True), ((4,), False)])
def test_two_zeros_block_each_other_and_one_does_not(tmp_path, factors, ill):
    model = perceptron(torch.nn.Identity)
    for layer in factors:
        torch.nn.init.zeros_(model[layer].weight)
        torch.nn.init.zeros_(model[layer].bias)
    found = train(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.05), *data(), steps=30)
    assert ("zero_init_blocked" in kinds(found, notes=False)) is ill
    if ill:
        assert set(found[0].sites) == {"2.weight", "4.weight"}
