"""A gradient scaler that nobody handed in, as the one inside a framework: its scale and the steps it skips."""

from __future__ import annotations

import pytest
import torch

import sonde
from sonde.testing import assert_no_taps, tiny_mlp

STEPS, BAD = 8, {3, 4}


def train(folder=None, *, clips=False, **options):
    """Train with a scaler; steps in BAD get infinite gradients. Return the weights and the session.

    With `clips`, gradients are unscaled and clipped before a fused optimizer is called, which skips bad steps itself
    (as in a Trainer of transformers).
    """
    torch.manual_seed(0)
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=clips)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    session = sonde.watch(model, optimizer, run=folder, budget=None, **options) if folder else None
    for step in range(1, STEPS + 1):
        loss = model(torch.randn(6, 8)).pow(2).mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if step in BAD:
            next(model.parameters()).grad.fill_(float("inf"))
        if clips:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        scaler.step(optimizer)
        scaler.update()
    if session is not None:
        session.close()
    return [each.detach().clone() for each in model.parameters()], session


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "clipped and fused"])
def recorded(request, tmp_path_factory):
    return *train(tmp_path_factory.mktemp("scaler") / "run", clips=request.param), request.param


def test_training_is_bit_identical_and_the_scaler_is_left_as_it_was(recorded):
    assert all(map(torch.equal, recorded[0], train(clips=recorded[2])[0]))
    assert_no_taps()


def test_the_skipped_steps_are_marked_and_counted(recorded):
    run = sonde.open_run(recorded[1].path)
    assert run.steps.tolist() == list(range(STEPS + 1))
    assert run.blocks.step[run.blocks.skipped].tolist() == sorted(BAD)


def test_the_scale_is_recorded_and_gradients_are_unscaled(recorded):
    run = sonde.open_run(recorded[1].path)
    assert run.series("scaler.scale:scalar", "value").values.tolist() == [256, 256, 256, 128, 64, 64, 64, 64]
    assert run.series("0.weight:gradient", "norm").values[0] < 10, "a scaled one is 256 times as large"


def test_two_skipped_steps_are_no_finding(recorded):
    assert [each.kind for each in recorded[1].findings if each.severity != "info"] == []


def test_a_scaler_of_another_model_is_left_alone(tmp_path):
    watched, other = tiny_mlp(), tiny_mlp()
    first, second = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (watched, other))
    scaler = torch.amp.GradScaler("cpu")
    with sonde.watch(watched, first, run=tmp_path / "run") as session:
        for _ in range(3):
            scaler.scale(other(torch.randn(6, 8)).sum()).backward()
            scaler.step(second)
            scaler.update()
            watched(torch.randn(6, 8)).sum().backward()
            first.step()
    run = sonde.open_run(session.path)
    assert run.steps.tolist() == [0, 1, 2, 3]
    assert not any(site.name == "scaler.scale" for site in run.sites)
