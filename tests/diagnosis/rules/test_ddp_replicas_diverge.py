"""Two ranks as two recordings of one run: alike they are replicas, left to themselves they drift apart."""

from __future__ import annotations

import torch

import sonde
from sonde.testing import tiny_mlp


def train(path, rank, *, averaged, wide=16):
    torch.manual_seed(0)
    model = tiny_mlp(hidden=wide)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=path, rank=rank):
        for step in range(6):
            batches = [torch.randn(8, 8, generator=torch.Generator().manual_seed(100 * step + r)) for r in range(2)]
            # What all-reduce does: both ranks use the gradient over both batches.
            x = torch.cat(batches) if averaged else batches[rank]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
            optimizer.step()


def kinds(path):
    return {finding.kind: finding for finding in sonde.diagnose(path).findings}


def test_ranks_that_do_not_share_gradients_are_reported_with_the_step(tmp_path):
    for rank in range(2):
        train(tmp_path / "run", rank, averaged=False)
    found = kinds(tmp_path / "run")["ddp_replicas_diverge"]
    assert found.severity == "critical"
    assert found.step == 1
    assert "0.weight" in found.sites


def test_replicas_that_agree_are_silent(tmp_path):
    for rank in range(2):
        train(tmp_path / "run", rank, averaged=True)
    diagnosis = sonde.diagnose(tmp_path / "run")
    assert "ddp_replicas_diverge" not in {finding.kind for finding in diagnosis.findings}
    assert "ddp_replicas_diverge" not in diagnosis.unmeasured


def test_one_rank_gets_no_verdict(tmp_path):
    train(tmp_path / "run", 0, averaged=True)
    assert "ddp_replicas_diverge" in sonde.diagnose(tmp_path / "run").unmeasured


def test_shards_are_no_replicas(tmp_path):
    for rank, wide in enumerate((16, 8)):
        train(tmp_path / "run", rank, averaged=True, wide=wide)
    found = kinds(tmp_path / "run").get("ddp_replicas_diverge")
    assert found is None or "0.weight" not in found.sites
