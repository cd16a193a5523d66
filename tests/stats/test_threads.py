"""Results do not depend on threads, and other Python threads may measure at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.stats.measuring import measured

from sonde.core import schema
from sonde.stats import library


@pytest.fixture(scope="module")
def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = [10, 70_000, 300_000, 0, 65_536, 1_000_003]
    return [1000 + torch.randn(size, generator=generator) for size in sizes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_any_number_of_threads_gives_the_same_bits(native_kernel, threads, tensors, dtype):
    assert native_kernel.library.has_threads
    converted = [tensor.to(dtype) for tensor in tensors]
    results = []
    for number in (1, 2, 3, 8):
        threads(number)
        arena = native_kernel.arena(len(tensors))
        native_kernel.measure(converted, range(len(tensors)), arena)
        results.append(native_kernel.ship(arena).take())

    for rows, bins in results[1:]:
        assert (rows == results[0][0]).all()
        assert (bins == results[0][1]).all()


def test_any_number_of_threads_gives_the_same_change(native_kernel, threads, tensors):
    results = []
    for number in (1, 2, 5):
        threads(number)
        shadows = [tensor + 1 for tensor in tensors]
        arena = native_kernel.arena(2 * len(tensors))
        evens, odds = range(0, 2 * len(tensors), 2), range(1, 2 * len(tensors), 2)
        native_kernel.measure_change(tensors, shadows, evens, odds, arena)
        results.append(native_kernel.ship(arena).take()[0])
        assert all(map(torch.equal, tensors, shadows))

    assert (results[0] == results[1]).all()
    assert (results[0] == results[2]).all()


def test_more_chunks_than_fit_into_one_wave(native_kernel, threads):
    threads(2)
    tensor = torch.ones(300 * 65_536 + 1, dtype=torch.float16)

    row, bins = measured(native_kernel, tensor)

    assert row[schema.SEEN] == 1
    assert row[schema.COUNT] == row[schema.GE_ONE] == row[schema.ABS_SUM] == bins[schema.ONE_BIN] == tensor.numel()
    assert (row[schema.MEAN], row[schema.M2]) == (1, 0)


def test_tensors_that_share_a_row_are_merged_in_order(native_kernel, threads, tensors):
    results = []
    for number in (1, 4):
        threads(number)
        results.append(measured(native_kernel, *tensors))

    assert (results[0][0] == results[1][0]).all()
    assert results[0][0][schema.SEEN] == len(tensors)


def test_without_a_thread_pool_to_borrow_the_result_is_the_same(native_kernel, threads, tensors, monkeypatch):
    threads(2)
    together = measured(native_kernel, *tensors)
    monkeypatch.setattr(native_kernel.library, "has_threads", False)

    alone = measured(native_kernel, *tensors)

    assert (alone[0] == together[0]).all()
    assert (alone[1] == together[1]).all()


def test_python_threads_measure_side_by_side(native_kernel, tensors):
    expected = measured(native_kernel, *tensors)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: measured(native_kernel, *tensors), range(8)))

    for rows, bins in results:
        assert (rows == expected[0]).all()
        assert (bins == expected[1]).all()


def test_a_machine_without_the_symbol_measures_alone(monkeypatch):
    native = library.load()
    if native is None:
        pytest.skip("the native library is not built here")
    monkeypatch.setattr(library, "_THREAD_POOL_SYMBOL", "no_such_symbol")

    assert library.Library(native.path).has_threads is False
