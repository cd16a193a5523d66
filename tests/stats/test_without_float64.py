"""Devices that calculate in float32 only (Apple's GPUs, some of Intel's), shown on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.oracles.rows import FLOAT32_SUMS, assert_row, oracle
from tests.stats.cases import CASES, normal
from tests.stats.measuring import CPU, device_kernel, measured, numbers

from sonde.core import schema
from sonde.stats import torch_arena, torch_kernel

HALVES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def kernel():
    return device_kernel(real=torch.float32)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_tensor_has_the_oracles_row(kernel, dtype, case):
    tensor = CASES[case].to(dtype)

    row, bins = measured(kernel, tensor)

    expected, expected_bins = oracle(numbers(tensor))
    assert_row(row, expected, FLOAT32_SUMS)
    assert (bins == expected_bins).all()


def test_nothing_is_calculated_in_float64(kernel):
    arena = kernel.arena(1)
    assert {part.dtype for part in (arena.counts, arena.averages, arena.bins)} == {torch.int64, torch.float32}


@pytest.mark.parametrize("names", [("normal", "relu"), ("ones", "ones"), ("empty", "nan"), ("only nan", "large")])
def test_parts_merge_into_the_row_of_the_whole(kernel, names):
    parts = [CASES[name].float() for name in names]

    row, bins = measured(kernel, *parts)

    expected, expected_bins = oracle(numbers(torch.cat(parts)), tensors=2)
    assert_row(row, expected, FLOAT32_SUMS)
    assert (bins == expected_bins).all()


def test_a_tensor_of_many_chunks_has_the_oracles_row(kernel, monkeypatch):
    monkeypatch.setattr(torch_kernel, "_CHUNK", 1000)
    tensor = (3 + normal(20_500)).float()

    row, bins = measured(kernel, tensor)

    expected, expected_bins = oracle(numbers(tensor))
    assert_row(row, expected, FLOAT32_SUMS)
    assert (bins == expected_bins).all()


def test_counts_are_exact_beyond_what_float32_can_count(kernel):
    size = (1 << 24) + 1  # float32 takes this for the number below
    sparse = torch.sparse_coo_tensor([[4, 7]], [2.0, torch.nan], (size,), check_invariants=False)

    row, _ = measured(kernel, sparse, sparse)

    assert float(np.float32(size)) != size
    assert (row[schema.SEEN], row[schema.COUNT]) == (2, 2 * size)
    assert (row[schema.ZERO], row[schema.GE_ONE], row[schema.NAN]) == (2 * (size - 2), 2, 2)


@pytest.mark.parametrize("magnitude", [1e-35, 1e-30, 1e25, 1e38])
def test_squares_and_sums_beyond_float32_are_right(kernel, magnitude):
    tensor = magnitude * normal(5000).clamp(-3, 3).float()

    row, _ = measured(kernel, tensor)

    expected, _ = oracle(numbers(tensor))
    assert 0 < row[schema.M2] < np.inf
    assert_row(row, expected, FLOAT32_SUMS)


def test_the_widest_float_is_found_by_trying(monkeypatch):
    assert torch_arena.widest_float(CPU) == torch.float64
    ones = torch.ones

    def without_float64(*size, dtype, **options):
        if dtype == torch.float64:
            raise RuntimeError("Required aspect fp64 is not supported on the device")
        return ones(*size, dtype=dtype, **options)

    monkeypatch.setattr(torch, "ones", without_float64)
    torch_arena.widest_float.cache_clear()
    try:
        assert device_kernel().arena(1).averages.dtype == torch.float32
    finally:
        torch_arena.widest_float.cache_clear()
