from __future__ import annotations

import pytest
import torch
from programs import data, kinds, perceptron, train

import sonde
from sonde.sensors.resuming import StateSteps


@pytest.mark.parametrize("ill", [True, False])
@pytest.mark.parametrize("counts", [True, False], ids=["the count tells", "the count is on a device, the updates tell"])
def test_moments_that_were_dropped_are_noticed(tmp_path, monkeypatch, counts, ill):
    if not counts:
        monkeypatch.setattr(StateSteps, "on_step", lambda *_: None)
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    taken = []

    def forget():
        taken.append(1)
        if len(taken) == 21 and ill:
            optimizer.state.clear()

    found = train(tmp_path, model, optimizer, *data(), steps=100, before_step=forget)
    stale = [finding for finding in found if finding.kind == "momentum_state_stale"]
    assert [finding.step for finding in stale] == ([21] if ill else [])
    told = (
        "steps its memory counts then"
        if counts
        else "weights moved by just the learning rate, as by a fresh optimizer, in step"
    )
    assert [finding.evidence[0].name for finding in stale] == ([told] if ill else [])


def test_an_optimizer_of_signs_is_not_blamed(tmp_path):
    class Signs(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad = parameter.grad.sign()
            return super().step(closure)

    model = perceptron()
    assert kinds(train(tmp_path, model, Signs(model.parameters(), lr=1e-3), *data()), notes=False) == []


def test_an_optimizer_that_joins_in_late_is_not_taken_for_one_that_forgot(tmp_path):
    model, late = perceptron(), perceptron()
    first = torch.optim.Adam(model.parameters(), lr=3e-3)
    second = torch.optim.Adam(late.parameters(), lr=3e-3)
    x, y = data()
    with sonde.watch({"early": model, "late": late}, [first, second], run=tmp_path / "run") as session:
        for step in range(40):
            for each, optimizer in ((model, first), (late, second)):
                if optimizer is first or step >= 8:
                    optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(each(x), y).backward()
                    optimizer.step()
    assert "momentum_state_stale" not in kinds(session.findings)


@pytest.mark.parametrize("weights", ["go on", "loaded", "drawn"])
def test_a_new_optimizer_for_other_weights_has_lost_nothing(tmp_path, weights):
    model = perceptron()
    initial = {name: each.clone() for name, each in model.state_dict().items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    x, y = data()
    with sonde.watch(model, optimizer, run=tmp_path / "run", tape=False) as session:
        for _fold in range(4):
            if weights == "loaded":
                model.load_state_dict(initial)
            elif weights == "drawn":
                model.apply(lambda each: each.reset_parameters() if hasattr(each, "reset_parameters") else None)
            optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
            for _ in range(8):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
    assert ("momentum_state_stale" in kinds(session.findings, notes=False)) is (weights == "go on")


def test_an_optimizer_that_is_created_in_every_epoch_has_lost_its_state(tmp_path):
    """The taping holds the first one, which it was given: it is not the program that still has it."""
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    x, y = data()
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        for _epoch in range(3):
            for _ in range(8):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    assert "momentum_state_stale" in kinds(session.findings, notes=False)
    assert session.current_step == 24


@pytest.mark.parametrize("turns", [(1, 1, 1), (5, 1), (3, 3), (1, 4, 2)])
def test_optimizers_of_the_same_weights_that_take_turns_have_lost_nothing(tmp_path, turns):
    model = perceptron()
    optimizers = [torch.optim.Adam(model.parameters(), lr=3e-3) for _ in turns]
    x, y = data()
    with sonde.watch(model, optimizers[0], run=tmp_path / "run", tape=False) as session:
        for _ in range(6):
            for optimizer, times in zip(optimizers, turns, strict=True):
                for _ in range(times):
                    optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
    assert "momentum_state_stale" not in kinds(session.findings, notes=False)
