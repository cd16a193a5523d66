"""A run that is taken up again is judged like any other, and what it lost is named."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import sonde
from sonde.testing import tiny_mlp


def train(model, optimizer, path, *, resume):
    with sonde.watch(model, optimizer, run=path, resume=resume) as session:
        for _ in range(8):
            x = torch.randn(32, 8)
            loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return session


@pytest.mark.parametrize("loads_the_optimizer", [False, True])
def test_an_optimizer_that_was_not_loaded_is_named_live_and_from_the_files(tmp_path, loads_the_optimizer):
    torch.manual_seed(0)
    model = tiny_mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train(model, optimizer, tmp_path / "run", resume=False)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if loads_the_optimizer:
        optimizer.load_state_dict(state)
    session = train(model, optimizer, tmp_path / "run", resume=True)
    for findings in (session.findings, sonde.diagnose(tmp_path / "run").findings):
        named = [finding for finding in findings if finding.kind == "resume_incomplete"]
        assert bool(named) is not loads_the_optimizer
        for finding in named:
            assert (finding.step, finding.sites) == (9, ("optimizer",))
        assert not [finding for finding in findings if finding.kind == "momentum_state_stale"]
