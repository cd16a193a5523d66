"""Losses that a program bound to a name before the session began, and what else stands in for torch's functions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.sensors.watching import Watching
from torch import nn
from torch.nn.functional import cross_entropy, l1_loss, mse_loss

import sonde
from sonde.sensors.loss_functions import FUNCTIONS
from sonde.testing import tiny_mlp

LABELS = torch.tensor([0, 1, 2, 0])


def train(tmp_path, function, target, outputs=3, steps=3):
    torch.manual_seed(0)
    model = tiny_mlp(4, 8, outputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(len(target), 4)
    with Watching(tmp_path, model, optimizer) as seen:
        for _ in range(steps):
            optimizer.zero_grad()
            function(model(inputs), target).backward()
            optimizer.step()
    return seen


def test_a_cross_entropy_imported_by_name_is_seen_with_its_settings(tmp_path):
    seen = train(tmp_path, lambda out, y: cross_entropy(out, y, reduction="sum", label_smoothing=0.1), LABELS)
    (loss,) = seen.facts.losses
    assert (loss.kind, loss.classes, loss.input_shape) == ("cross_entropy", 3, (4, 3))
    assert (loss.settings["reduction"], loss.settings["label_smoothing"]) == ("sum", 0.1)
    assert loss.settings["weighted"] is False


def test_shapes_before_broadcasting_are_known_of_a_loss_bound_early(tmp_path):
    with pytest.warns(UserWarning, match="broadcast"):
        seen = train(tmp_path, mse_loss, torch.randn(4), outputs=1)
    (loss,) = seen.facts.losses
    assert (loss.kind, loss.input_shape, loss.target_shape) == ("mse_loss", (4, 1), (1, 4))


def test_a_loss_looked_up_in_torch_is_counted_once(tmp_path):
    seen = train(tmp_path, lambda out, y: F.cross_entropy(out, y), LABELS)
    assert len(seen.facts.losses) == 1
    assert "loss_fn:output#1" not in seen.keys


def test_two_losses_bound_early_are_kept_apart(tmp_path):
    both = lambda out, y: mse_loss(out, y) + l1_loss(out, y)  # noqa: E731
    seen = train(tmp_path, both, torch.randn(4, 3))
    assert {loss.kind for loss in seen.facts.losses} == {"mse_loss", "l1_loss"}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_code_scripted_during_and_after_a_session_finds_torchs_own_functions(tmp_path):
    def criterion(out, target):
        return F.mse_loss(out, target) + torch.kl_div(out, target, 1)

    out, target = torch.rand(3), torch.rand(3)
    model = tiny_mlp()
    with sonde.watch(model, run=tmp_path / "run"):
        during = torch.jit.script(criterion)(out, target)
    assert torch.equal(during, torch.jit.script(criterion)(out, target))
    assert torch.equal(during, criterion(out, target))


def test_every_function_is_put_back_exactly(tmp_path):
    before = [getattr(each.function._owner, each.function._name) for each in FUNCTIONS]
    known = dict(torch.jit._builtins._get_builtin_table())
    with sonde.watch(nn.Linear(2, 2), run=tmp_path / "run"):
        assert torch._C._nn.mse_loss is not before[-1]
    assert all(
        getattr(each.function._owner, each.function._name) is old for each, old in zip(FUNCTIONS, before, strict=True)
    )
    assert torch.jit._builtins._get_builtin_table() == known
