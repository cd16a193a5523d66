from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from handmade import ask, loss, model, patient
from programs import kinds, perceptron, train


@pytest.mark.parametrize(("scale", "ill"), [(1e4, True), (1.0, False)])
def test_prices_in_cents_are_found(tmp_path, scale, ill):
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    y = scale * (x[:, :1] + 3)
    model = perceptron(classes=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    found = train(tmp_path, model, optimizer, x, y, loss_fn=lambda output, target: F.mse_loss(output, target))
    assert (kinds(found, notes=False)[:1] == ["target_scale"]) is ill


@pytest.mark.parametrize(
    ("target", "losses", "ill"),
    [
        ([100.0, 140.0], [15000.0] * 30, True),
        ([100.0, 140.0], [15000.0, 9.0, 1.0] * 10, False),
        ([1.0, 3.0], [5.0] * 30, False),
    ],
)
def test_what_is_far_beyond_the_first_outputs_is_found_where_the_run_gets_nowhere(target, losses, ill):
    losses = losses if len(set(losses)) == 1 else sorted(losses, reverse=True)
    readings = {
        "loss_fn:input.input": [[-0.2, 0.3]] * 30,
        "loss_fn:input.target": [target] * 30,
        "loss:scalar": losses,
    }
    about = {"loss_fn:input.target": {"dtype": "float32"}, "loss_fn:input.input": {"kind": "mse_loss"}}
    case = patient(readings, model("a.weight", losses=(loss("mse_loss"),)), about=about)
    assert (ask("target_scale", case) is not None) is ill
