"""Listening to backward passes: seen once, never altered, put back exactly."""

from __future__ import annotations

import functools
import sys

import pytest
import torch
from torch import nn

from sonde.hooks.on_backward import OutputGraph, before_backward


@pytest.fixture
def heard():
    return []


@pytest.fixture
def listen(heard):
    listeners, original = [], torch.autograd.backward

    def listen():
        listeners.append(before_backward(lambda roots, gradients: heard.append((roots, gradients))))
        return listeners[-1]

    yield listen
    for each in listeners:
        each.remove()
    assert torch.autograd.backward is original


def test_both_ways_to_call_backward_are_seen_once_with_their_roots(listen, heard):
    listen()
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
    listener = before_backward(lambda roots, gradients: saved.append(roots[0].grad_fn._saved_self.tolist()))
    torch.full((1,), 4.0, requires_grad=True).log().backward()
    listener.remove()
    assert saved == [[4.0]]


def test_two_listeners_hear_and_leave_apart(listen, heard):
    others = []
    listen()
    other = before_backward(lambda roots, gradients: others.append(roots))
    torch.ones(1, requires_grad=True).sum().backward()
    other.remove()
    torch.ones(1, requires_grad=True).sum().backward()
    assert (len(heard), len(others)) == (2, 1)


def test_a_wrapper_of_someone_else_survives_and_nothing_is_seen_twice(listen, heard):
    original = torch.autograd.backward
    listener = listen()
    ours = torch.autograd.backward

    @functools.wraps(ours)
    def theirs(*args, **kwargs):
        return ours(*args, **kwargs)

    torch.autograd.backward = theirs
    listener.remove()
    assert torch.autograd.backward is theirs
    torch.ones(1, requires_grad=True).sum().backward()
    assert not heard
    listener = listen()
    torch.ones(1, requires_grad=True).sum().backward()
    assert len(heard) == 1
    torch.autograd.backward = ours
    listener.remove()
    assert torch.autograd.backward is original


def test_what_torch_alone_can_read_is_left_to_torch(listen, heard):
    listen()
    weight = torch.ones(2, requires_grad=True)
    torch.autograd.backward(each for each in [weight.sum()])  # a generator can be used up only once
    assert weight.grad.tolist() == [1, 1]
    with pytest.raises(TypeError):
        torch.autograd.backward()
    assert not heard


def test_the_graph_of_an_output_is_watched_without_running_python():
    model = nn.Linear(3, 2)
    output = model(torch.randn(4, 3))
    graph = OutputGraph({"output": output})
    assert graph.exists
    assert not graph.has_gradient
    called = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_filename) if event == "call" else None)
    try:
        output.sum().backward()
    finally:
        sys.setprofile(None)
    assert graph.has_gradient
    assert not [each for each in called if "sonde" in each]
    del output
    assert not graph.exists
