"""A NaN that the loop writes into the model's output: the operation is named, and not the model."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="it trains")

from sonde.store import open_run

LOOP = """import torch, sonde
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
with sonde.watch(model, optimizer, run=run) as session:
    for step in range(6):
        x = torch.randn(16, 8)
        scores = model(x)
        if step == 4:
            {change}
        loss = torch.nn.functional.cross_entropy(scores, x[:, :3].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
"""
CHANGES = {
    "scores = scores - scores.max() - 1; scores.log_()": "`log` at loop.py:10",
    "scores.div_(scores * 0)": "`/` at loop.py:10",
    "scores[0] = float('nan')": "made between lines 8 and 13 of loop.py",
    "scores.data.div_(0 * scores.data)": "made between lines 8 and 13 of loop.py",
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_operation_is_named_and_not_the_line_of_the_model(change, tmp_path):
    file = tmp_path / "loop.py"
    file.write_text(LOOP.format(change=change))
    exec(compile(file.read_text(), str(file), "exec"), {"run": tmp_path / "run", "__name__": "__main__"})
    (finding,) = [each for each in open_run(tmp_path / "run").findings if each.kind.startswith("nan_in")]
    assert finding.kind == "nan_in_loss"
    assert CHANGES[change] in finding.cause
    assert "appears at loop.py:8" not in finding.cause
