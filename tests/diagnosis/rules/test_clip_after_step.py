from __future__ import annotations

import pytest
import torch
from programs import data, kinds, perceptron, train


@pytest.mark.parametrize("where", ["before_step", "after_step"])
def test_clipping_counts_only_before_the_step(tmp_path, where):
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def clip():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    found = train(tmp_path, model, optimizer, *data(), steps=12, **{where: clip})
    assert ("clip_after_step" in kinds(found)) is (where == "after_step")
