from __future__ import annotations

import pytest
import torch
from programs import data, kinds, perceptron, train


@pytest.mark.parametrize(("eps", "ill"), [(10.0, True), (1e-8, False)])
def test_an_eps_above_the_gradients_is_found(tmp_path, eps, ill):
    model = perceptron()
    found = train(tmp_path, model, torch.optim.Adam(model.parameters(), lr=1e-3, eps=eps), *data(), steps=40)
    assert ("adam_eps_too_large" in kinds(found)) is ill


@pytest.mark.parametrize(("rate", "severity"), [(1e-3, "warning"), (0.3, "info")])
def test_an_eps_above_the_gradients_is_a_note_where_the_rate_makes_up_for_it(tmp_path, rate, severity):
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, eps=1.0)
    found = train(tmp_path, model, optimizer, *data(), steps=60)
    assert {each.severity for each in found if each.kind == "adam_eps_too_large"} == {severity}
