from __future__ import annotations

import pytest
import torch
from programs import kinds

import sonde


def run(folder, detach):
    torch.manual_seed(0)
    net = torch.nn.GRU(4, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session = sonde.watch(net, optimizer, run=folder / "run")
    hidden = None
    with session:
        for _ in range(3):
            out, hidden = net(torch.randn(5, 2, 4), hidden)
            hidden = hidden.detach() if detach else hidden
            optimizer.zero_grad()
            out.square().mean().backward()
            optimizer.step()
    return session


def test_a_state_with_its_graph_is_named_when_the_backward_fails(tmp_path):
    with pytest.raises(RuntimeError, match="second time"):
        run(tmp_path, detach=False)
    found = sonde.open_run(tmp_path / "run").findings
    assert "rnn_state_not_detached" in kinds(found, notes=False)


def test_a_detached_state_is_fine(tmp_path):
    assert "rnn_state_not_detached" not in kinds(run(tmp_path, detach=True).findings)
