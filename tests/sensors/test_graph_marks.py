"""What the graph of the first backward pass says about shapes and targets, held against the tensors themselves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sonde.core.facts import ColumnFacts
from sonde.sensors.architecture import read_reshapes
from sonde.sensors.losses import read_columns
from sonde.sensors.objectives import read_bootstrap


@pytest.fixture
def column():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 1))(torch.randn(6, 4))


def no_module(sequence):
    return ""


@pytest.mark.parametrize(
    ("change", "marked"),
    [
        (lambda x: x.view(3, 5, 4), True),
        (lambda x: x.reshape(3, 4, 5), False),  # all three have moved: not the usual slip
        (lambda x: x.transpose(0, 1), False),
        (lambda x: x.transpose(0, 1).reshape(3, 5, 4), False),  # moved before
        (lambda x: x.reshape(15, 4), False),
        (lambda x: x.view(5, 4, 3), False),  # batch and heads joined behind the first axis may look like this
        (lambda x: x[:, :1].reshape(1, 5, 4), False),
    ],
)
def test_a_view_that_exchanges_the_first_size_and_another_is_marked(change, marked):
    x = torch.randn(5, 3, 4, requires_grad=True) * 2
    found = read_reshapes(change(x).sum(), no_module)
    assert [(each.before, each.after) for each in found] == ([((5, 3, 4), (3, 5, 4))] if marked else [])


@pytest.mark.parametrize(
    ("loss", "operation"),
    [
        (lambda column, row: (F.smooth_l1_loss(column, row[:, None], reduction="none") * row).mean(), "mul"),
        (lambda column, row: -(row * torch.sigmoid(column).clamp(1e-6).log()).mean(), "mul"),
        (lambda column, row: (column - row).abs().mean(), "sub"),
        (lambda column, row: (torch.exp(column) / row).sum(), "div"),
    ],
)
def test_a_column_of_a_layer_that_meets_a_row_is_marked(column, loss, operation):
    row = torch.rand(6) + 0.5
    assert read_columns(loss(column, row)) == [ColumnFacts(operation=operation, column=(6, 1), result=(6, 6))]


@pytest.mark.parametrize(
    "loss",
    [
        lambda column, row: (column - row[:, None]).abs().mean(),
        lambda column, row: (column.squeeze(1) * row).mean(),
        lambda column, row: (column.squeeze(1).unsqueeze(1) - row).relu().mean(),  # all pairs, on purpose
        lambda column, row: (column.expand(6, 6) * torch.rand(6, 6)).mean(),
        lambda column, row: (column * 0.5).mean(),
    ],
)
def test_columns_that_fit_or_were_made_on_purpose_are_left_alone(column, loss):
    assert read_columns(loss(column, torch.rand(6) + 0.5)) == []


def temporal_difference(loss, *, detach):
    torch.manual_seed(0)
    critic = nn.Linear(4, 1)
    target = torch.randn(6) + 0.9 * critic(torch.randn(6, 4)).squeeze(-1) * torch.ones(6)
    return loss(critic(torch.randn(6, 4)).squeeze(-1), target.detach() if detach else target)


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (F.mse_loss, "mse_loss"),
        (F.smooth_l1_loss, "smooth_l1_loss"),
        (F.huber_loss, "huber_loss"),
        (lambda value, target: ((value - target) ** 2).mean(), "difference"),
        (lambda value, target: (target - value).abs().mean(), "difference"),
    ],
)
def test_a_target_made_of_data_and_of_the_model_counts_unless_it_is_detached(loss, kind):
    assert read_bootstrap(temporal_difference(loss, detach=False)) == kind
    assert read_bootstrap(temporal_difference(loss, detach=True)) == ""


def test_a_gradient_into_weights_that_no_optimizer_holds_moves_no_target():
    critic, target = nn.Linear(4, 1), nn.Linear(4, 1)
    loss = F.smooth_l1_loss(critic(torch.randn(6, 4)), torch.randn(6, 1) + 0.9 * target(torch.randn(6, 4)))
    assert read_bootstrap(loss, {id(critic.weight), id(critic.bias)}) == ""
    assert read_bootstrap(loss, {id(critic.weight), id(target.weight)}) == "smooth_l1_loss"


def test_two_views_of_one_sample_may_be_drawn_together():
    model = nn.Linear(4, 3)
    x = torch.randn(6, 4)
    assert read_bootstrap(F.mse_loss(model(x), model(x + 0.1))) == ""
    assert read_bootstrap(F.mse_loss(0.5 * model(x), torch.randn(6, 3))) == ""
