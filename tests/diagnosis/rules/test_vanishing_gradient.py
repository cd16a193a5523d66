from __future__ import annotations

import pytest
import torch
from programs import data, kinds, train


def deep(act):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 16), act()]
    for _ in range(7):
        layers += [torch.nn.Linear(16, 16), act()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(16, 3))


@pytest.mark.parametrize("act", [torch.nn.Sigmoid, torch.nn.ELU])
def test_eight_sigmoids_let_nothing_through(tmp_path, act):
    model = deep(act)
    found = train(tmp_path, model, torch.optim.Adam(model.parameters(), lr=1e-3), *data())
    assert (kinds(found, notes=False)[:1] == ["vanishing_gradient"]) is (act is torch.nn.Sigmoid)
    if act is torch.nn.Sigmoid:
        assert found[0].sites[0] == "0.weight"
