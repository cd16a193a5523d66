from __future__ import annotations

import pytest
import torch
from programs import data, kinds, perceptron, train


@pytest.mark.parametrize(("eps", "ill"), [(10.0, True), (1e-8, False)])
def test_an_eps_above_the_gradients_is_found(tmp_path, eps, ill):
    model = perceptron()
    found = train(tmp_path, model, torch.optim.Adam(model.parameters(), lr=1e-3, eps=eps), *data(), steps=40)
    assert ("adam_eps_too_large" in kinds(found)) is ill
