from __future__ import annotations

import pytest
import torch
from programs import data, kinds, perceptron, train


@pytest.mark.parametrize(("lr", "ill"), [(1e-7, True), (3e-3, False)])
def test_a_rate_that_moves_nothing_is_found(tmp_path, lr, ill):
    model = perceptron()
    found = train(tmp_path, model, torch.optim.Adam(model.parameters(), lr=lr), *data())
    assert (kinds(found, notes=False)[:1] == ["lr_too_low"]) is ill


def test_a_warm_up_is_not_too_low(tmp_path):
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1e-5 * 1.1**step)
    assert "lr_too_low" not in kinds(train(tmp_path, model, optimizer, *data(), after_step=schedule.step))
