"""A run that is taken up again is judged like any other, and what it lost is named."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import sonde
from sonde.testing import tiny_mlp


def test_an_optimizer_that_goes_on_from_an_earlier_checkpoint_has_kept_its_state(tmp_path):
    torch.manual_seed(0)
    model = tiny_mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train(model, optimizer, tmp_path / "run", resume=False)
    state = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, tmp_path / "run", resume=True)
    optimizer.load_state_dict(state)
    train(model, optimizer, tmp_path / "run", resume=True)
    assert [finding.kind for finding in sonde.diagnose(tmp_path / "run").findings] == []


def train(model, optimizer, path, *, resume):
    with sonde.watch(model, optimizer, run=path, resume=resume) as session:
        for _ in range(8):
            x = torch.randn(32, 8)
            loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return session


@pytest.mark.parametrize("loads_the_optimizer", [False, True])
def test_an_optimizer_that_was_not_loaded_is_named_live_and_from_the_files(tmp_path, loads_the_optimizer):
    torch.manual_seed(0)
    model = tiny_mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train(model, optimizer, tmp_path / "run", resume=False)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if loads_the_optimizer:
        optimizer.load_state_dict(state)
    session = train(model, optimizer, tmp_path / "run", resume=True)
    for findings in (session.findings, sonde.diagnose(tmp_path / "run").findings):
        named = [finding for finding in findings if finding.kind == "resume_incomplete"]
        assert bool(named) is not loads_the_optimizer
        for finding in named:
            assert (finding.step, finding.sites) == (9, ("optimizer",))
        assert not [finding for finding in findings if finding.kind == "momentum_state_stale"]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_run_that_goes_on_from_an_earlier_checkpoint_finds_its_step_from_the_optimizer(tmp_path, kind):
    model = tiny_mlp()
    optimizer = kind(model.parameters(), lr=3e-3)
    train(model, optimizer, tmp_path / "run", resume=False)
    checkpoint = copy.deepcopy(optimizer.state_dict())  # after step 8
    train(model, optimizer, tmp_path / "run", resume=True)
    assert sonde.open_run(tmp_path / "run").steps.tolist() == list(range(17))
    optimizer.load_state_dict(checkpoint)
    session = train(model, optimizer, tmp_path / "run", resume=True)
    steps = sonde.open_run(tmp_path / "run").steps.tolist()
    assert steps == list(range(17 if kind is torch.optim.AdamW else 25)), "SGD's state counts no steps"
    assert not [each for each in session.findings if each.kind in ("resume_incomplete", "momentum_state_stale")]


@pytest.mark.parametrize("loads_the_schedule", [False, True])
def test_a_schedule_that_begins_again_is_named_live_and_from_the_files(tmp_path, loads_the_schedule):
    states = []
    for resume in (False, True):
        model = tiny_mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        for part, state in zip((model, optimizer, schedule), states, strict=False):
            part.load_state_dict(state)
        with sonde.watch(model, optimizer, run=tmp_path / "run", resume=resume, scheduler=schedule) as session:
            for _ in range(4):
                x = torch.randn(32, 8)
                loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
        parts = (model, optimizer, schedule) if loads_the_schedule else (model,)
        states = [copy.deepcopy(part.state_dict()) for part in parts]
    for findings in (session.findings, sonde.diagnose(tmp_path / "run").findings):
        named = [finding.sites for finding in findings if finding.kind == "resume_incomplete"]
        assert named == ([] if loads_the_schedule else [("scheduler",)])


@pytest.mark.parametrize("loads", ["optimizer", "optimizer and schedule", "nothing"])
@pytest.mark.parametrize("kind", ["lambda", "exponential"])
def test_a_schedule_that_begins_at_another_rate_than_the_loaded_optimizer_has_is_named(tmp_path, kind, loads):
    before = scheduled_by_epochs(kind)
    epochs(*before, sonde.watch(*before[:2], run=tmp_path / "before"))
    kinds = [finding.kind for finding in go_on(tmp_path / "after", before, kind, loads).findings]
    assert ("resume_incomplete" in kinds) is (loads == "optimizer" and kind == "lambda")


def scheduled_by_epochs(kind):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if kind == "lambda":
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # goes on from any rate


def go_on(path, before, kind, loads):
    model, optimizer, schedule = scheduled_by_epochs(kind)
    session = sonde.watch(model, optimizer, run=path)
    if loads != "nothing":
        optimizer.load_state_dict(copy.deepcopy(before[1].state_dict()))
    if loads == "optimizer and schedule":
        schedule.load_state_dict(before[2].state_dict())
    return epochs(model, optimizer, schedule, session)


def epochs(model, optimizer, schedule, session):
    with session:
        for number in range(12):
            x = torch.randn(32, 8)
            loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if number % 4 == 3:
                schedule.step()
    return session


@pytest.mark.parametrize("loads_the_schedule", [False, True])
def test_a_schedule_that_begins_again_for_a_loaded_optimizer_is_named(tmp_path, loads_the_schedule):
    def build():
        torch.manual_seed(0)
        model = tiny_mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)

    def scheduled(model, optimizer, scheduler, path):
        with sonde.watch(model, optimizer, run=path) as session:
            for _ in range(12):
                x = torch.randn(32, 8)
                loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
        return session

    before = build()
    scheduled(*before, tmp_path / "before")
    after = build()
    for new, old in zip(after, before, strict=True):
        if new is not after[2] or loads_the_schedule:
            new.load_state_dict(copy.deepcopy(old.state_dict()))
    kinds = [finding.kind for finding in scheduled(*after, tmp_path / "after").findings]
    assert ("resume_incomplete" in kinds) is not loads_the_schedule
