"""Gradients that are cleared between the backward passes of one step, beside programs that only look like it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sonde
from sonde.core import signals


def watched(folder, take_step):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with sonde.watch(net, optimizer, run=folder / "run", on_error="raise") as session:
        for _ in range(8):
            take_step(net, optimizer)
    run = sonde.open_run(folder / "run")
    key = f"optimizer:vital.{signals.THROWN_AWAY}"
    shares = run.series(key, "mean").values.tolist() if key in {site.key for site in run.sites} else []
    return shares, "zero_grad_misplaced" in [finding.kind for finding in session.findings]


def loss_of(net, x=None):
    return F.cross_entropy(net(torch.randn(6, 4) if x is None else x), torch.randint(3, (6,)))


def clears_each_time(net, optimizer, set_to_none=True):
    for _ in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(net).backward()
    optimizer.step()


def gathers(net, optimizer):
    optimizer.zero_grad()
    for _ in range(3):
        loss_of(net).backward()
    optimizer.step()


def once(net, optimizer):
    optimizer.zero_grad()
    loss_of(net).backward()
    optimizer.step()


def climbs_first(net, optimizer):
    optimizer.zero_grad()
    loss_of(net).backward()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.01 * parameter.grad)
    optimizer.zero_grad()
    loss_of(net).backward()
    optimizer.step()


def attacks_first(net, optimizer):
    x = torch.randn(6, 4, requires_grad=True)
    loss_of(net, x).backward()
    optimizer.zero_grad()
    loss_of(net, (x + 0.1 * x.grad.sign()).detach()).backward()
    optimizer.step()


def puts_them_together(net, optimizer):
    kept = []
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(net).backward()
        kept.append([parameter.grad.clone() for parameter in net.parameters()])
    for parameter, one, two in zip(net.parameters(), *kept, strict=True):
        parameter.grad = one + two
    optimizer.step()


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_of_all_passes_but_the_last_are_thrown_away(tmp_path, to_none):
    shares, named = watched(tmp_path, lambda net, optimizer: clears_each_time(net, optimizer, to_none))
    assert (shares, named) == ([1.0] * 8, True)


@pytest.mark.parametrize(
    ("take_step", "shares"),
    [(gathers, [0.0] * 8), (once, []), (climbs_first, [0.0] * 8), (puts_them_together, [0.0] * 8)],
)
def test_gathering_and_what_changes_weights_or_gradients_in_between_throws_nothing_away(tmp_path, take_step, shares):
    assert watched(tmp_path, take_step) == (shares, False)


def test_passes_for_the_gradient_of_an_input_are_meant(tmp_path):
    assert watched(tmp_path, attacks_first) == ([1.0] * 8, False)
