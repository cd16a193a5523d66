from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from programs import kinds, perceptron, train


@pytest.mark.parametrize(("scale", "ill"), [(1e4, True), (1.0, False)])
def test_prices_in_cents_are_found(tmp_path, scale, ill):
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    y = scale * (x[:, :1] + 3)
    model = perceptron(classes=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    found = train(tmp_path, model, optimizer, x, y, loss_fn=lambda output, target: F.mse_loss(output, target))
    assert (kinds(found, notes=False)[:1] == ["target_scale"]) is ill
