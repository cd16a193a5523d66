from __future__ import annotations

import torch
import torch.nn.functional as F
from patients import asked, patient

import sonde
from sonde.core.facts import Facts, LossFacts
from sonde.diagnosis.rules.targets import padding_dominates


def run(valid):
    facts = Facts(losses=(LossFacts(kind="cross_entropy", classes=5, target_shape=(4, 25)),))
    sites = {"loss_fn:vital.valid_targets": [valid] * 10, "loss_fn:input.target": [[1.0] * 100] * 10}
    return asked(padding_dominates, patient(sites, facts))


def test_batches_of_padding_are_worth_a_note():
    assert run(20.0).severity == "info"
    assert run(80.0) is None


def test_several_batches_of_a_step_are_not_padding_of_each_other(tmp_path):
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with sonde.watch(net, optimizer, run=tmp_path / "run", on_error="raise") as session:
        for _ in range(8):
            optimizer.zero_grad()
            for _ in range(4):
                (F.cross_entropy(net(torch.randn(16, 4)), torch.randint(3, (16,))) / 4).backward()
            optimizer.step()
    assert "padding_dominates" not in [finding.kind for finding in session.findings]
