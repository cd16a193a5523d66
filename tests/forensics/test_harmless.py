"""Watching for non-finite values never alters a training, and says nothing about infinities that are meant."""

from __future__ import annotations

import gc
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sonde
from sonde.testing import tiny_mlp

PROGRAMS = sys.modules["forensics_programs"].PROGRAMS  # made known by conftest.py


class CausalAttention(nn.Module):
    """Attention with masks of every kind that people write, none of which covers a whole row."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(8, 7)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("mask", torch.full((5, 5), float("-inf")).triu(1))

    def forward(self, x, allowed):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = q @ k.transpose(1, 2) + self.mask
        scores = scores.masked_fill(~allowed[:, None, :], float("-inf")) + torch.log(allowed.float())[:, None, :]
        h = self.drop(F.softmax(scores, -1)) @ v
        logits = self.head(h)
        banned = torch.zeros(7)
        banned[3] = float("-inf")
        return logits + banned, torch.where(logits > 0, logits, float("-inf")).amax(-1)


def train_attention(watch):
    torch.manual_seed(5)
    model = CausalAttention()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    with watch(model, optimizer):
        for _ in range(4):
            allowed = torch.ones(3, 5, dtype=torch.bool)
            allowed[1, 2:] = False
            logits, _ = model(torch.randn(3, 5, 8), allowed)
            loss = F.cross_entropy(logits.flatten(0, 1), torch.randint(3, (15,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return model, torch.stack(losses)


class NoWatch:
    def __init__(self, *args, **options):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


def test_intended_infinities_are_not_reported(reported):
    assert reported(train_attention) == []


def test_a_healthy_training_is_bit_identical(tmp_path):
    model, losses = train_attention(
        lambda *args, **options: sonde.watch(*args, run=tmp_path / "run", on_error="raise", guard="skip", **options)
    )
    bare, bare_losses = train_attention(NoWatch)
    assert torch.equal(losses, bare_losses)
    assert all(
        torch.equal(one, two) for one, two in zip(model.state_dict().values(), bare.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize(
    "name",
    ["nan_in_one_sample", "dropout_then_log", "sqrt_backward", "bce_by_hand_in_a_function", "checkpointed_block",
     "accumulated_micro_batches", "custom_function", "under_autocast", "adam_without_eps"],
)  # fmt: skip
def test_repeating_a_step_leaves_training_as_it_was(name, tmp_path):
    """Weights, buffers, gradients, optimizer state, random numbers: after a step was repeated, all is bit-identical."""
    run = PROGRAMS[name].run
    states = []

    def keep(watch):
        kept = {}

        def remember(model, optimizer, **options):
            kept["objects"] = (model, optimizer)
            return watch(model, optimizer, **options)

        torch.manual_seed(0)
        run(remember)
        model, optimizer = kept["objects"]
        tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters() if p.grad is not None)]
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        states.append(([each.detach().clone() for each in tensors], torch.get_rng_state(), torch.rand(3)))

    keep(lambda *args, **options: sonde.watch(*args, run=tmp_path / "run", on_error="raise", **options))
    keep(NoWatch)
    assert any("origin" in f.data for f in sonde.open_run(tmp_path / "run").findings), "nothing was repeated"
    (watched, watched_random, watched_draw), (bare, bare_random, bare_draw) = states
    assert len(watched) == len(bare)
    assert all(torch.equal(one.view(-1).isnan(), two.view(-1).isnan()) for one, two in zip(watched, bare, strict=True))
    assert all(torch.equal(one.nan_to_num(), two.nan_to_num()) for one, two in zip(watched, bare, strict=True))
    assert torch.equal(watched_random, bare_random)
    assert torch.equal(watched_draw, bare_draw)


def test_the_batch_is_let_go_when_the_step_ends(tmp_path):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise"):
        x = torch.randn(4, 8)
        seen = weakref.ref(x)
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        del x, loss
        gc.collect()
        assert seen() is None


def test_a_batch_that_the_model_writes_into_is_not_written_into_again(tmp_path):
    class Scaling(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 1)

        def forward(self, x):
            x.mul_(2)
            return torch.log(self.fc(x) * 0)

    model = Scaling()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(3, 2)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise"):
        model(x).sum().backward()
        optimizer.step()
    assert x.tolist() == [[2, 2]] * 3
    finding = next(each for each in sonde.open_run(tmp_path / "run").findings if "origin" in each.data)
    assert finding.data["inputs_written_over"] is True
    assert not finding.exact


def test_an_operation_that_passes_no_gradient_on_is_not_a_fault(tmp_path):
    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return None

    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    what = ("outputs", "output_gradients", "gradients")
    with sonde.watch(model, optimizer, run=tmp_path / "run", what=what, on_error="raise") as session:
        for _ in range(3):
            y = model(torch.randn(2, 3))
            (Cut.apply(y).sum() + torch.ones(1, requires_grad=True)).sum().backward()
            optimizer.step()
    assert session.current_step == 3
