"""Backward passes are counted by whom they reach."""

from __future__ import annotations

import torch

from sonde.hooks.on_backward import Reach
from sonde.sensors.loop import MAX_TRACED, spread
from sonde.testing import assert_no_taps, tiny_mlp


def test_passes_are_counted_for_those_they_reach():
    left, right = tiny_mlp(), tiny_mlp()
    reach = Reach()
    reach.listen("left", left.parameters())
    reach.listen("right", right.parameters())
    x = torch.ones(2, 8)
    for model in (left, left, right):
        model(x).sum().backward()
        reach.settle()
    (left(x) + right(x)).sum().backward()
    assert (reach.passes_of("left"), reach.passes_of("right"), reach.passes) == (2, 1, 3)
    reach.settle()
    reach.settle()
    assert (reach.passes_of("left"), reach.passes_of("right"), reach.passes) == (3, 2, 4)
    reach.remove()
    for model in (left, right):
        assert_no_taps(model)


def test_an_owner_found_later_gets_what_had_no_owner_before():
    model = tiny_mlp()
    reach = Reach()
    reach.listen("", model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    reach.claim("optimizer", model.parameters())
    assert reach.passes_of("optimizer") == 1
    model(torch.ones(2, 8)).sum().backward()
    reach.settle()
    assert (reach.passes_of("optimizer"), reach.passes_of("")) == (2, 1)
    reach.remove()


def test_what_takes_no_gradient_is_left_alone():
    model = tiny_mlp()
    model[0].requires_grad_(False)
    reach = Reach()
    reach.listen("", model.parameters())
    assert_no_taps(model[0])
    reach.remove()
    assert reach.passes_of("nobody") == 0


def test_a_large_model_is_traced_at_parameters_spread_over_all_of_it():
    assert spread(range(10)) == list(range(10))
    chosen = spread(range(1000))
    assert len(chosen) == MAX_TRACED
    assert chosen[0] == 0
    assert max(b - a for a, b in zip(chosen, [*chosen[1:], 1000], strict=True)) <= 1000 // MAX_TRACED + 1
