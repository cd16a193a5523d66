"""Of several models that are trained in one process, each session takes the losses of its own."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import sonde
from sonde.debug import DebugConfig, debug_session


class Trained:
    """A model, its optimizer, and the losses it was trained on."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.losses = []

    def batch(self):
        x = torch.randn(16, 8)
        return x, (x[:, 0] > 0).long()

    def step(self, loss_fn=F.cross_entropy):
        x, y = self.batch()
        loss = loss_fn(self.model(x), y)
        loss.backward()
        self.update(loss)

    def update(self, loss):
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())


def losses_in(run, key="loss_fn:output"):
    series = sonde.open_run(run).series(key, "mean")
    return dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))


def as_steps(losses):
    return pytest.approx(dict(enumerate(losses, 1)))


def one_after_the_other(a, b):
    for _ in range(3):
        a.step()
    for _ in range(5):
        b.step()


def in_turns(a, b):
    for _ in range(4):
        a.step()
        b.step()


def in_one_backward(a, b):
    for _ in range(4):
        x, y = a.batch()
        first, second = a.model(x), b.model(x)
        one, other = F.cross_entropy(first, y), F.cross_entropy(second, y)
        (one + other).backward()
        a.update(one)
        b.update(other)


def written_by_hand(a, b):
    def loss_fn(output, y):
        return (output.exp().sum(1).log() - output.gather(1, y[:, None])[:, 0]).pow(1.1).mean()

    for _ in range(3):
        a.step(loss_fn)
        b.step(loss_fn)


@pytest.mark.parametrize("training", [one_after_the_other, in_turns, in_one_backward, written_by_hand])
def test_two_sessions_at_once_each_record_the_losses_of_their_own_model(tmp_path, training):
    a, b = Trained(0), Trained(1)
    with (
        sonde.watch(a.model, a.optimizer, run=tmp_path / "a"),
        sonde.watch(b.model, b.optimizer, run=tmp_path / "b"),
    ):
        training(a, b)
    for name, each in (("a", a), ("b", b)):
        assert losses_in(tmp_path / name) == as_steps(each.losses)
        assert "loss_fn:output#1" not in {site.key for site in sonde.open_run(tmp_path / name).sites}


def test_two_debug_sessions_at_once_each_record_the_losses_of_their_own_model(tmp_path):
    a, b = Trained(0), Trained(1)
    config = DebugConfig(output_dir=tmp_path)
    with debug_session(a.model, a.optimizer, config) as first, debug_session(b.model, b.optimizer, config) as second:
        one_after_the_other(a, b)
    assert losses_in(first.report.run) == as_steps(a.losses)
    assert losses_in(second.report.run) == as_steps(b.losses)


def test_a_model_that_is_not_watched_does_not_count_for_the_one_that_is(tmp_path):
    watched, other = Trained(0), Trained(1)
    with sonde.watch(watched.model, watched.optimizer, run=tmp_path / "run"):
        in_turns(watched, other)
    assert losses_in(tmp_path / "run") == as_steps(watched.losses)
    assert losses_in(tmp_path / "run", "(loop):vital.root") == as_steps(watched.losses)


def test_the_loss_of_a_critic_is_not_that_of_the_generator_that_made_its_samples(tmp_path):
    generator, critic = nn.Linear(4, 8), nn.Linear(8, 1)
    makes, judges = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic))
    fooled = []
    with (
        sonde.watch(generator, makes, run=tmp_path / "generator"),
        sonde.watch(critic, judges, run=tmp_path / "critic"),
    ):
        for _ in range(3):
            made = generator(torch.randn(6, 4))
            F.binary_cross_entropy_with_logits(critic(made.detach()), torch.zeros(6, 1)).backward()
            judges.step()
            loss = F.binary_cross_entropy_with_logits(critic(made), torch.ones(6, 1))
            loss.backward()
            makes.step()
            makes.zero_grad()
            judges.zero_grad()
            fooled.append(loss.item())
    assert losses_in(tmp_path / "generator") == as_steps(fooled)


def test_evaluations_of_two_sessions_are_distinguished_by_which_ran_last(tmp_path):
    a, b = Trained(0), Trained(1)
    told = []
    with (
        sonde.watch(a.model, a.optimizer, run=tmp_path / "a"),
        sonde.watch(b.model, b.optimizer, run=tmp_path / "b"),
    ):
        in_turns(a, b)
        for each in (a, b):
            with torch.no_grad():
                x, y = each.batch()
                told.append(float(F.cross_entropy(each.model(x), y)))
    for name, value in zip("ab", told, strict=True):
        assert list(losses_in(tmp_path / name, "loss_fn:output@eval").values()) == pytest.approx([value])


def replaced(trained):
    trained.model.load_state_dict(copy.deepcopy(trained.model.state_dict()), assign=True)
    trained.optimizer = torch.optim.SGD(trained.model.parameters(), lr=0.1)


def second_loss(trained):
    """Differentiate one output twice: at the second loss no pass has run since the last backward."""
    x, y = trained.batch()
    output = trained.model(x)
    F.cross_entropy(output, y).backward(retain_graph=True)
    F.mse_loss(output, torch.zeros_like(output)).backward()


class Hidden(nn.Module):
    """Runs its layers where no graph leads to their parameters."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 3)

    def forward(self, x):
        return checkpoint(self.inner, x.requires_grad_(), use_reentrant=True)


def test_parameters_that_were_replaced_are_the_models_own(tmp_path):
    each = Trained(0)
    with sonde.watch(each.model, run=tmp_path / "run"):
        each.step()
        replaced(each)
        each.step()
        each.step()
    # Its steps are no longer seen, since the new optimizer is a stranger; its losses are.
    assert sonde.open_run(tmp_path / "run").series("loss_fn:output", "count").values.sum() == 3


def test_two_losses_of_one_pass_are_both_taken(tmp_path):
    each = Trained(0)
    with sonde.watch(each.model, each.optimizer, run=tmp_path / "run"):
        for _ in range(2):
            second_loss(each)
            each.update(torch.zeros(()))
    kinds = {site.kind for site in sonde.open_run(tmp_path / "run").sites if site.key.startswith("loss_fn:output")}
    assert kinds == {"cross_entropy", "mse_loss"}


@pytest.mark.parametrize("model", [Hidden(), nn.Linear(8, 3).requires_grad_(False)], ids=["hidden", "frozen"])
def test_a_pass_of_the_model_decides_for_a_loss_whose_graph_does_not(tmp_path, model):
    head = nn.Linear(3, 3)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    said = []
    with sonde.watch(model, run=tmp_path / "run"):
        for _ in range(2):
            output = model(torch.randn(4, 8))
            loss = (output if output.requires_grad else head(output)).square().mean()
            loss = F.l1_loss(loss, torch.zeros(()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            said.append(loss.item())
    assert list(losses_in(tmp_path / "run").values()) == pytest.approx(said)
