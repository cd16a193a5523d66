"""The loss of a program that logs none is what its backward passes were called on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sonde
from sonde.analysis import find_loss, loss_title
from sonde.testing import tiny_mlp

STEPS = 12


class WithLoss(nn.Module):
    """Returns its loss, as the models of transformers do; inside it is a sum that is divided."""

    def __init__(self):
        super().__init__()
        self.net = tiny_mlp()

    def forward(self, x, y):
        scores = self.net(x)
        return SimpleNamespace(loss=F.cross_entropy(scores, y, reduction="sum") / len(y), logits=scores)


def batch():
    x = torch.randn(16, 8)
    return x, x[:, :4].argmax(1)


def train(path, *, passes=1, divide=True, scaler=None, own=False, hand_in=True, budget=None, steps=STEPS):
    """Train without logging; return the mean loss of each iteration."""
    torch.manual_seed(0)
    model = WithLoss() if own else tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    with sonde.watch(model, optimizer if hand_in else None, run=path, on_error="raise", budget=budget) as session:
        for _ in range(steps):
            optimizer.zero_grad()
            losses = []
            for _ in range(passes):
                x, y = batch()
                loss = model(x, y).loss if own else F.cross_entropy(model(x), y)
                losses.append(loss.item())
                loss = loss / passes if divide else loss
                (loss if scaler is None else scaler.scale(loss)).backward()
            expected.append(sum(losses) / passes)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
    return expected, session


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hand_in": False},
        {"passes": 3},
        {"passes": 3, "divide": False},
        {"own": True},
        {"own": True, "passes": 2},
        {"scaler": torch.amp.GradScaler("cpu", init_scale=1024.0)},
        {"scaler": torch.amp.GradScaler("cpu", init_scale=1024.0), "passes": 2},
        {"budget": 0.01, "steps": 40},
    ],
    ids=["plain", "found", "divided", "not divided", "own", "own divided", "scaled", "scaled divided", "thinned"],
)
def test_the_loss_of_an_iteration_is_recorded_at_every_step(tmp_path, options):
    expected, session = train(tmp_path / "run", **options)
    run = sonde.open_run(tmp_path / "run")
    loss = find_loss(run.sites)
    assert loss.key == "loss:scalar"
    series = run.series(loss)
    assert series.steps.tolist() == list(range(1, options.get("steps", STEPS) + 1))
    assert series.values.tolist() == pytest.approx(expected, rel=1e-5)
    source = "the model's own output 'loss'" if options.get("own") else "what backward() was called on"
    assert loss_title(loss) == f"loss ({source})"
    assert [event.data["source"] for event in run.events if event.event_type == "loss_seen"] == [source]
    unscaled = {"accumulation_not_scaled"} if options.get("divide") is False else set()
    assert {each.kind for each in session.findings if each.severity != "info"} == unscaled


@pytest.mark.parametrize("name", ["loss", "train/loss"])
def test_a_program_that_logs_its_loss_has_that_one_only(tmp_path, name):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        for _ in range(6):
            x, y = batch()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            session.log({name: 0.5, "val_loss": 0.7}, step=9)
    run = sonde.open_run(tmp_path / "run")
    logged = {site.name for site in run.sites if site.quantity == "scalar" and "loss" in site.name}
    assert logged == {name, "val_loss"}
    assert run.series(name).values.tolist() == [0.5] * 6
    assert not [event for event in run.events if event.event_type == "loss_seen"]


@pytest.mark.parametrize(("name", "steps"), [("train_loss", [1, 2, 3, 4, 5, 6, 7, 8]), ("loss", [1, 2, 3, 4, 8])])
def test_a_loss_that_is_logged_now_and_then_does_not_replace_that_of_each_step(tmp_path, name, steps):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        for step in range(1, 9):
            x, y = batch()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if step in (4, 8):
                session.log({name: 0.5})
    run = sonde.open_run(tmp_path / "run")
    assert run.series("loss").steps.tolist() == steps, "a program's own `loss` is not mixed with another"
    assert run.series(name).values[-1] == 0.5


def test_a_validation_loss_is_not_taken_for_the_training_loss(tmp_path):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        for _ in range(6):
            x, y = batch()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            session.log(val_loss=0.7)
    assert len(sonde.open_run(tmp_path / "run").series("loss").values) == 6


@pytest.mark.parametrize("hand_in", [True, False])
def test_each_optimizer_with_a_backward_pass_of_its_own_has_a_loss(tmp_path, hand_in):
    generator, judge = tiny_mlp(4, 8, 8), tiny_mlp(8, 8, 1)
    one, two = (torch.optim.Adam(each.parameters(), lr=1e-3) for each in (judge, generator))
    losses = []
    models = {"generator": generator, "judge": judge}
    with sonde.watch(models, [one, two] if hand_in else None, run=tmp_path / "run", budget=None):
        for _ in range(8):
            fake = generator(torch.randn(6, 4))
            first = F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(torch.randn(6, 8))).mean()
            one.zero_grad()
            first.backward()
            one.step()
            second = F.softplus(-judge(fake)).mean()
            two.zero_grad()
            second.backward()
            two.step()
            losses.append((first.item(), second.item()))
    run = sonde.open_run(tmp_path / "run")
    assert {site.name for site in run.sites if site.quantity == "scalar" and "loss" in site.name} == {
        "loss/optimizer",
        "loss/optimizer2",
    }
    for index, name in enumerate(("loss/optimizer", "loss/optimizer2")):
        values = run.series(name).values.tolist()
        assert len(values) >= 7
        assert values == pytest.approx([each[index] for each in losses][-len(values) :], rel=1e-5)


def test_a_loss_that_is_written_to_after_its_backward_pass_is_not_recorded(tmp_path):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run"):
        for _ in range(4):
            x, y = batch()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            with torch.no_grad():
                loss.mul_(1000)
            optimizer.step()
    assert find_loss(sonde.open_run(tmp_path / "run").sites) is None


def test_the_losses_of_other_models_are_left_out(tmp_path):
    model, other = tiny_mlp(), tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    with sonde.watch(model, optimizer, run=tmp_path / "run", budget=None):
        for _ in range(6):
            x, y = batch()
            (1000 * F.cross_entropy(other(x), y)).backward()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            expected.append(loss.item())
            optimizer.step()
    assert sonde.open_run(tmp_path / "run").series("loss").values.tolist() == pytest.approx(expected, rel=1e-5)
