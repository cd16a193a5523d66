"""The kernel of plain torch operations on a CUDA device: streams, graphs that are captured, and several devices."""

from __future__ import annotations

import threading

import pytest
import torch
from tests.oracles.rows import FLOAT32_SUMS, FLOAT64_SUMS, assert_row, oracle

from sonde.core import schema
from sonde.stats import TorchKernel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none")

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def kernel():
    return TorchKernel(DEVICE)


@pytest.mark.parametrize("real", [torch.float64, torch.float32], ids=str)
def test_a_tensor_has_the_oracles_row(real):
    kernel = TorchKernel(DEVICE, real=real)
    tensor = torch.randn(20_000) * 3 + 1
    tensor[[3, 700, 9000]] = torch.tensor([torch.nan, torch.inf, 0.0])
    arena = kernel.arena(2)
    assert kernel.measure_one(tensor.to(DEVICE), 1, arena)
    rows, bins = kernel.ship(arena).take()
    expected, expected_bins = oracle(tensor.double().numpy())
    assert_row(rows[1], expected, FLOAT64_SUMS if real == torch.float64 else FLOAT32_SUMS)
    assert (bins[1] == expected_bins).all()


def test_measuring_shipping_and_emptying_never_wait(kernel, no_waiting):
    tensor, shadow = torch.ones(1000, device=DEVICE), torch.zeros(1000, device=DEVICE)
    arena = kernel.arena(2)
    with no_waiting():
        for _ in range(3):
            kernel.measure_change([tensor], [shadow], [0], [1], arena)
            shipment = kernel.ship(arena)
            arena.reset()
    assert shipment.take()[0][0, schema.COUNT] == 1000


def test_a_graph_capture_is_left_alone(kernel):
    tensor, shadow = torch.ones(1000, device=DEVICE), torch.zeros(1000, device=DEVICE)
    arena = kernel.arena(2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = tensor * 2
        assert kernel.measure_one(doubled, 0, arena) is False
        kernel.measure([doubled], [0], arena)
        kernel.measure_change([doubled], [shadow], [0], [1], arena)
    graph.replay()
    assert kernel.skipped == 3
    assert not kernel.ship(arena).take()[0].any()
    assert not shadow.any()


def test_a_worker_takes_and_empties_rows_while_another_thread_captures(kernel):
    tensor = torch.ones(1000, device=DEVICE)
    arena = kernel.arena(1)
    kernel.measure_one(tensor, 0, arena)
    shipment, taken = kernel.ship(arena), []

    def work():
        taken.append(shipment.take()[0])
        arena.reset()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        doubled = tensor * 2
        worker = threading.Thread(target=work)
        worker.start()
        worker.join()
    graph.replay()
    assert taken[0][0, schema.COUNT] == 1000
    assert doubled.sum().item() == 2000
    assert not kernel.ship(arena).take()[0].any(), "a replay puts nothing into the rows"


def test_an_arena_may_be_used_from_streams_in_turn(kernel):
    arena = kernel.arena(1)
    tensors = [torch.ones(1 << 22, device=DEVICE) for _ in range(3)]
    torch.cuda.synchronize()
    for tensor in tensors:
        with torch.cuda.stream(torch.cuda.Stream()):
            kernel.measure_one(tensor, 0, arena)
    row = kernel.ship(arena).take()[0][0]
    assert (row[schema.SEEN], row[schema.COUNT], row[schema.ABS_SUM]) == (3, 3 << 22, 3 << 22)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_rows_of_a_device_that_is_not_current_arrive_when_they_are_there():
    other = torch.device("cuda", 1)
    kernel = TorchKernel(other)
    arena = kernel.arena(1)
    for _ in range(20):
        kernel.measure_one(torch.ones(1 << 22, device=other), 0, arena)
    assert kernel.ship(arena).take()[0][0, schema.COUNT] == 20 << 22
    assert not kernel.measure_one(torch.ones(3, device=DEVICE), 0, arena), "a tensor elsewhere is not fetched"
