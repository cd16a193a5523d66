from __future__ import annotations

from functools import partial

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


@pytest.mark.parametrize(("limit", "decay", "ill"), [(1e-4, 1e-2, True), (1e-4, 0.0, False), (10.0, 1e-2, False)])
def test_a_clipping_that_leaves_less_of_the_gradients_than_the_decay_adds_is_found(tmp_path, limit, decay, ill):
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=decay)
    clip = partial(torch.nn.utils.clip_grad_norm_, list(model.parameters()), limit)
    found = train(tmp_path, model, optimizer, *data(), steps=80, before_step=clip)
    assert bool({"clip_always_active", "weight_decay_too_large"} & set(kinds(found, notes=False))) is ill


def test_a_decay_is_not_blamed_for_weights_that_get_no_gradient(tmp_path):
    model = perceptron()
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
        model[2].bias.fill_(-100.0)
        model[4].weight.zero_()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-3)
    assert "weight_decay_too_large" not in kinds(train(tmp_path, model, optimizer, *data(), steps=80))


@pytest.mark.parametrize(("decay", "ill"), [(0.3, True), (1e-4, False)])
def test_a_decay_that_outweighs_the_gradients_of_the_loss_is_found_though_the_loss_falls_a_little(tmp_path, decay, ill):
    model = perceptron()
    inputs, targets = data()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=decay)
    found = train(tmp_path, model, optimizer, inputs, targets, steps=120)
    assert ("weight_decay_too_large" in kinds(found, notes=False)) is ill
