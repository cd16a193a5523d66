from __future__ import annotations

import pytest
import torch
from programs import data, kinds, perceptron, train

import sonde


@pytest.mark.parametrize("where", ["before_step", "after_step"])
def test_clipping_counts_only_before_the_step(tmp_path, where):
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def clip():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    found = train(tmp_path, model, optimizer, *data(), steps=12, **{where: clip})
    assert ("clip_after_step" in kinds(found)) is (where == "after_step")


@pytest.mark.parametrize(("early", "lr"), [(True, 0.05), (True, 1e20), (False, 0.05)])
def test_clipping_before_the_backward_pass_meets_nothing(tmp_path, early, lr):
    model, (x, y) = perceptron(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise") as session:
        for start in range(0, 240, 20):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x[start : start + 20]), y[start : start + 20])
            if early:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            loss.backward()
            if not early:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    found = [finding for finding in session.findings if finding.kind == "clip_after_step"]
    assert bool(found) is early
    assert not early or "before loss.backward()" in found[0].cause
