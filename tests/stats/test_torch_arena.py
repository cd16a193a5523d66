"""What torch operations promise about graphs and threads, as far as a CPU can show it."""

from __future__ import annotations

import pytest
import torch
from tests.stats.measuring import Operations, device_kernel

from sonde.core import schema


def test_emptying_an_arena_queues_nothing_until_it_is_used_again():
    kernel = device_kernel()
    arena = kernel.arena(2)
    kernel.measure_one(torch.ones(3), 0, arena)

    with Operations() as operations:
        arena.reset()

    assert not operations.names
    kernel.measure_one(torch.ones(5), 1, arena)
    rows, bins = kernel.ship(arena).take()
    assert not rows[0].any()
    assert not bins[0].any()
    assert rows[1, schema.COUNT] == bins[1].sum() == 5


def test_rows_that_are_asked_about_are_those_of_now():
    kernel = device_kernel()
    arena = kernel.arena(1)
    kernel.measure_one(torch.tensor([torch.nan, 1.0]), 0, arena)
    assert arena.rows[0, schema.NAN : schema.NEG_INF + 1].any()
    arena.reset()
    assert not arena.rows[0, schema.NAN : schema.NEG_INF + 1].any()


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_nothing_is_measured_while_a_graph_is_captured_and_it_is_counted():
    kernel = device_kernel()
    arena = kernel.arena(2)
    shadow, answers = torch.zeros(3), []

    def captured(x):
        kernel.measure([x, x], [0, 1], arena)
        kernel.measure_change([x], [shadow], [0], [1], arena)
        answers.append(kernel.measure_one(x, 0, arena))
        return x + 1

    torch.jit.trace(captured, torch.ones(3), check_trace=False)

    assert kernel.skipped == 3
    assert answers == [False]
    assert not kernel.ship(arena).take()[0].any()
    assert not shadow.any(), "a shadow goes with the row of its change"
    assert kernel.measure_one(torch.ones(3), 0, arena)


def test_a_shipment_holds_what_was_shipped():
    kernel = device_kernel()
    arena = kernel.arena(1)
    kernel.measure_one(torch.ones(3), 0, arena)
    shipment = kernel.ship(arena)
    assert shipment.ready()
    kernel.measure_one(torch.ones(4), 0, arena)
    assert shipment.take()[0][0, schema.COUNT] == 3
