"""Listening to backward passes: seen once, never altered, put back exactly."""

from __future__ import annotations

import functools

import pytest
import torch

from sonde.taps.backward_calls import BackwardCalls


@pytest.fixture
def heard():
    return []


@pytest.fixture
def tap(heard):
    tap = BackwardCalls(lambda roots, gradients: heard.append((roots, gradients)))
    original = torch.autograd.backward
    yield tap
    tap.remove()
    assert torch.autograd.backward is original


def test_both_ways_to_call_backward_are_heard_once_with_their_roots(tap, heard):
    tap.attach()
    weight = torch.ones(3, requires_grad=True)
    loss = weight.sum()
    loss.backward()
    double = weight * 2
    torch.autograd.backward([double], [torch.ones(3)])
    assert [roots[0] is root for (roots, _), root in zip(heard, (loss, double), strict=True)] == [True, True]
    assert heard[0][1] == (None,)
    assert heard[1][1][0].tolist() == [1, 1, 1]
    assert weight.grad.tolist() == [3, 3, 3]


def test_the_graph_is_still_there_when_a_listener_is_called():
    saved = []
    tap = BackwardCalls(lambda roots, gradients: saved.append(roots[0].grad_fn._saved_self.tolist()))
    tap.attach()
    torch.full((1,), 4.0, requires_grad=True).log().backward()
    tap.remove()
    assert saved == [[4.0]]


def test_two_listeners_hear_and_leave_apart(tap, heard):
    others = []
    other = BackwardCalls(lambda roots, gradients: others.append(roots))
    tap.attach()
    other.attach()
    torch.ones(1, requires_grad=True).sum().backward()
    other.remove()
    torch.ones(1, requires_grad=True).sum().backward()
    assert (len(heard), len(others)) == (2, 1)


def test_a_wrapper_of_someone_else_survives_and_nothing_is_heard_twice(tap, heard):
    original = torch.autograd.backward
    tap.attach()
    ours = torch.autograd.backward

    @functools.wraps(ours)
    def theirs(*args, **kwargs):
        return ours(*args, **kwargs)

    torch.autograd.backward = theirs
    tap.remove()
    assert torch.autograd.backward is theirs
    torch.ones(1, requires_grad=True).sum().backward()
    assert not heard
    tap.attach()
    torch.ones(1, requires_grad=True).sum().backward()
    assert len(heard) == 1
    torch.autograd.backward = ours
    tap.remove()
    assert torch.autograd.backward is original
