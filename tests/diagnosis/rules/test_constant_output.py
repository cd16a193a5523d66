from __future__ import annotations

import pytest
import torch
from programs import data, kinds, perceptron, train


class Blind(torch.nn.Module):
    def __init__(self, share):
        super().__init__()
        self.net, self.share = perceptron(), share

    def forward(self, x):
        return self.net(x * self.share)


@pytest.mark.parametrize(("share", "ill"), [(0.0, True), (1.0, False)])
def test_an_output_that_ignores_its_input_is_found(tmp_path, share, ill):
    model = Blind(share)
    found = train(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.05), *data())
    assert ("constant_output" in kinds(found)) is ill
