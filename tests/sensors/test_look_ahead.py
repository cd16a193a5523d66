"""Which part of attention lies ahead, held against the weights themselves; and whether targets are the next tokens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sonde
from sonde.core import signals

LENGTH = 6


class Reader(nn.Module):
    """One attention, by hand or by torch, over embedded tokens."""

    def __init__(self, how):
        super().__init__()
        self.table, self.out, self.how = nn.Embedding(9, 8), nn.Linear(8, 9), how
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.weights = None

    def forward(self, tokens):
        x = self.table(tokens)
        mask = torch.ones(LENGTH, LENGTH).triu(1).bool()
        if self.how.startswith("hand"):
            scores = x @ x.transpose(1, 2)
            scores = scores.masked_fill(mask, -torch.inf) if self.how == "hand, masked" else scores
            self.weights = scores.softmax(-1)
            return self.out(self.weights @ x)
        if self.how.startswith("fused"):
            given = {"fused": {}, "fused, causal": {"is_causal": True}, "fused, masked": {"attn_mask": ~mask}}[self.how]
            x = x.unsqueeze(1)
            return self.out(F.scaled_dot_product_attention(x, x, x, **given).squeeze(1))
        return self.out(self.attention(x, x, x, attn_mask=mask if self.how == "module, masked" else None)[0])


def watch(folder, how, shift):
    torch.manual_seed(0)
    model = Reader(how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=folder / "run", on_error="raise") as session:
        for _ in range(4):
            text = torch.randint(9, (5, LENGTH + 1))
            now, target = text[:, :-1], text[:, 1:] if shift else torch.randint(9, (5, LENGTH))
            loss = F.cross_entropy(model(now).flatten(0, 1), target.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if session is not None and model.weights is not None and not hasattr(model, "first"):
                model.first = model.weights.detach()
    return model, sonde.open_run(folder / "run"), [finding.kind for finding in session.findings]


@pytest.mark.parametrize(
    ("how", "ahead"),
    [
        ("hand", None),
        ("hand, masked", 0.0),
        ("fused", (LENGTH - 1) / 2 / LENGTH),
        ("fused, causal", 0.0),
        ("fused, masked", 0.0),
        ("module, masked", 0.0),
    ],
)
def test_the_part_that_lies_ahead_is_that_of_the_weights(tmp_path, how, ahead):
    model, run, _ = watch(tmp_path, how, shift=True)
    if ahead is None:
        above = [float(row[at + 1 :].sum()) for sample in model.first for at, row in enumerate(sample)]
        ahead = sum(above) / len(above)
    [value] = run.series(f"{signals.LOOP}:vital.{signals.LOOKS_AHEAD}", "mean").values.tolist()
    assert value == pytest.approx(ahead, abs=1e-6)


@pytest.mark.parametrize("how", ["hand", "fused", "module"])
def test_a_model_that_sees_the_next_token_is_found_and_one_that_does_not_is_well(tmp_path, how):
    assert "future_leak" in watch(tmp_path / "ill", how, shift=True)[2]
    assert "future_leak" not in watch(tmp_path / "masked", f"{how}, masked", shift=True)[2]
    assert "future_leak" not in watch(tmp_path / "encoder", how, shift=False)[2]


def test_targets_are_compared_with_what_follows(tmp_path):
    _, run, _ = watch(tmp_path, "hand", shift=True)
    assert run.series(f"{signals.LOSS}:vital.{signals.NEXT_TOKEN}", "mean").values.tolist() == [1.0] * 3
