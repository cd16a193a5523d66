from __future__ import annotations

import pytest
import torch
from programs import data, kinds, perceptron, train


@pytest.mark.parametrize(("lr", "ill"), [(10.0, True), (3e-3, False)])
def test_a_rate_far_beyond_the_weights_is_found_and_a_usual_one_is_not(tmp_path, lr, ill):
    model = perceptron()
    found = train(tmp_path, model, torch.optim.Adam(model.parameters(), lr=lr), *data())
    assert ("lr_too_high" in kinds(found, notes=False)) is ill
    if ill:
        assert next(finding for finding in found if finding.kind == "lr_too_high").sites[0] == "optimizer"


def test_long_steps_of_a_run_that_learns_are_no_finding(tmp_path):
    model = perceptron()
    found = train(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.5), *data())
    assert "lr_too_high" not in kinds(found)
