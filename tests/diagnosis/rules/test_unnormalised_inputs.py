from __future__ import annotations

import pytest
import torch
from programs import data, kinds, perceptron, train


@pytest.mark.parametrize("ill", [True, False])
def test_features_of_very_different_scale_are_found(tmp_path, ill):
    x, y = data()
    scale = torch.logspace(-2, 4, 8) if ill else torch.ones(8)
    model = perceptron()
    found = train(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.05), x * scale, y)
    assert (kinds(found, notes=False)[:1] == ["unnormalised_inputs"]) is ill


def test_a_norm_at_the_door_makes_it_harmless(tmp_path):
    x, y = data()
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(8), *perceptron())
    found = train(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.05), x * torch.logspace(-2, 4, 8), y)
    assert "unnormalised_inputs" not in kinds(found)
