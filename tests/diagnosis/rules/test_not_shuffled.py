from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from programs import data, kinds, perceptron

import sonde


@pytest.mark.parametrize("ill", [True, False])
def test_classes_that_come_one_after_the_other_are_found(tmp_path, ill):
    x, y = data(samples=960)
    order = y.argsort() if ill else torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        for _ in range(2):
            for chosen in order.split(32):
                loss = F.cross_entropy(model(x[chosen]), y[chosen])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                session.log(loss=loss)
    assert (kinds(session.findings, notes=False)[:1] == ["not_shuffled"]) is ill


def test_clients_that_begin_with_common_weights_may_have_classes_of_their_own(tmp_path):
    x, y = data(samples=960)
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        common = {name: each.clone() for name, each in model.state_dict().items()}
        for client in y.argsort().split(96) * 2:
            model.load_state_dict(common)
            for chosen in client.split(32):
                loss = F.cross_entropy(model(x[chosen]), y[chosen])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                session.log(loss=loss)
            common = {name: (old + model.state_dict()[name]) / 2 for name, old in common.items()}
    assert "not_shuffled" not in kinds(session.findings, notes=False)
