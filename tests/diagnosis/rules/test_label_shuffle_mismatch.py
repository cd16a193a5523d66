from __future__ import annotations

import pytest
import torch
from programs import data, kinds, perceptron, train


@pytest.mark.parametrize("ill", [True, False])
def test_labels_in_another_order_than_their_inputs_are_found(tmp_path, ill):
    x, y = data(samples=2048)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(3))
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    found = train(tmp_path, model, optimizer, x, y[order] if ill else y, steps=90)
    assert (kinds(found, notes=False)[:1] == ["label_shuffle_mismatch"]) is ill


@pytest.mark.parametrize("blind", [True, False])
def test_a_model_that_cannot_tell_samples_apart_says_nothing_about_labels(tmp_path, blind):
    x, y = data(samples=2048)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(3))
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    found = train(tmp_path, model, optimizer, torch.zeros_like(x) if blind else x, y[order], steps=90)
    assert ("label_shuffle_mismatch" in kinds(found)) is not blind
