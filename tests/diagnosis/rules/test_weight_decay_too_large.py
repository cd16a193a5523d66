from __future__ import annotations

import pytest
import torch
from programs import data, kinds, perceptron, train


@pytest.mark.parametrize(
    ("make", "ill"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=2.0), True),
        (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=5e-4), False),
        (lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=30.0), True),
        (lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1), False),
        (lambda p: torch.optim.Adam(p, lr=3e-3, weight_decay=3.0), True),
        (lambda p: torch.optim.Adam(p, lr=3e-3, weight_decay=1e-4), False),
        (lambda p: torch.optim.SGD(p, lr=1e-6, weight_decay=0.5), False),  # too slow to shrink anything
    ],
)
def test_a_decay_that_leaves_nothing_of_the_weights_is_found(tmp_path, make, ill):
    model = perceptron()
    found = train(tmp_path, model, make(model.parameters()), *data(), steps=80)
    assert (kinds(found, notes=False)[:1] == ["weight_decay_too_large"]) is ill


@pytest.mark.parametrize(("decay", "ill"), [(0.3, True), (1e-4, False)])
def test_a_decay_that_outweighs_the_gradients_of_the_loss_is_found_though_the_loss_falls_a_little(tmp_path, decay, ill):
    model = perceptron()
    inputs, targets = data()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=decay)
    found = train(tmp_path, model, optimizer, inputs, targets, steps=120)
    assert ("weight_decay_too_large" in kinds(found, notes=False)) is ill
