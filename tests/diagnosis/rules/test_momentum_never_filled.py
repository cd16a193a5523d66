from __future__ import annotations

import pytest
import torch
from torch import nn

import sonde


@pytest.fixture
def nan_in_unused_memory():
    """Have torch fill memory that nobody has filled with NaN, as it does with deterministic algorithms."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def train(path, *, fused, overflows):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127 if overflows else 4.0)
    with sonde.watch(model, optimizer, scaler=scaler, run=path) as session:
        for _ in range(12):
            optimizer.zero_grad()
            loss = 4 * model(torch.randn(8, 20)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return session.findings, model


@pytest.mark.usefixtures("nan_in_unused_memory")
@pytest.mark.parametrize(
    ("fused", "overflows", "ill"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_a_fused_sgd_that_skips_its_first_step_is_named(tmp_path, fused, overflows, ill):
    findings, model = train(tmp_path / "run", fused=fused, overflows=overflows)
    found = [finding for finding in findings if finding.severity != "info"]
    assert bool(found) is ill, found
    assert all(torch.isfinite(each).all() for each in model.parameters()) is not ill
    if ill:
        assert found[0].kind == "momentum_never_filled"
        assert found[0].step > 1
        assert found[0].sites[0] == "optimizer"
