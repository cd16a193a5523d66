"""Every kernel, every dtype it reads, every kind of data that once went wrong: against the oracle."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles.rows import assert_row, oracle
from tests.stats.measuring import bits, bounds_for, make_kernel, measured, numbers

from sonde import schema

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
NAN, INF = math.nan, math.inf


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_odd_ones(values: torch.Tensor) -> torch.Tensor:
    values[3], values[700], values[-1] = NAN, INF, -INF
    return values


CASES = {
    "empty": torch.empty(0),
    "one": torch.tensor([-0.3]),
    "zero dimensions": torch.tensor(2.5),
    "normal": normal(5000),
    "nan": torch.tensor([NAN, 1.0, 2.0]),
    "only nan": torch.full((300,), NAN),
    "infinities": torch.tensor([INF, -INF, INF, 0.5, -3.0]),
    "only infinities": torch.tensor([INF, -INF]),
    "odd ones among many": with_odd_ones(normal(9000)),
    "odd ones first": torch.cat([torch.tensor([NAN, INF]), 1000 + 0.1 * normal(5000)]),
    "nan in every block": normal(20000).index_fill_(0, torch.arange(0, 20000, 1000), NAN),
    "only nan, then numbers": torch.cat([torch.full((5000,), NAN), normal(5000)]),
    "numbers, then only nan": torch.cat([normal(5000) - 7, torch.full((5000,), NAN)]),
    "denormals": torch.tensor([1e-45, -1e-40, 5e-39, 0.0]).repeat(100),
    "zeros": torch.zeros(5000),
    "signed zeros": torch.tensor([-0.0, 0.0, -0.0]),
    "constant": torch.full((9000,), 0.1),
    "negative constant": torch.full((4097,), -3.0),
    "ones": torch.ones(70),
    "relu": normal(6000).relu(),
    "far mean": 1000 + 0.01 * normal(20000),
    "very far mean": 1e6 + normal(5000),
    "far mean after zeros": torch.cat([torch.zeros(16), 1000 + 0.01 * normal(8000)]),
    "outlier first": torch.cat([torch.tensor([1e6]), 0.01 * normal(5000)]),
    "ramp": torch.arange(50000, dtype=torch.float64) / 64,
    "steps": torch.arange(8, dtype=torch.float64).repeat_interleave(4096),
    "huge": 1e38 * normal(5000).clamp(-3, 3),
    "large": 1e20 * normal(5000),
    "small": 1e-25 * normal(5000),
    "tiny": 1e-38 * normal(5000),
    "small spread": 1e-10 + 1e-17 * normal(5000),
    "half's largest": torch.tensor([65504.0, -65504.0]).repeat(3000),
    "half's smallest": torch.tensor([6e-8, -6e-5, 1e-3]).repeat(500),
    "edges of bins": (2.0 ** torch.arange(-60, 30, dtype=torch.float64)).repeat(60),
    "below edges": (1 - 2**-8) * 2.0 ** torch.arange(-60, 30, dtype=torch.float64),
    "wide": torch.exp(8 * normal(20000)).clamp(max=1e30),
    "wide, then narrow": torch.cat([torch.exp(8 * normal(5000)).clamp(max=1e30), normal(90000)]),
    "half tiny": torch.where(normal(9000) > 0, 1e-20, normal(9000)),
    "few below": torch.where(torch.arange(8000) % 100 == 0, 1e-6, 1.5),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_tensor_has_the_oracles_row(kernel, dtype, case):
    tensor = CASES[case].to(dtype)
    before = tensor.clone()

    row, bins = measured(kernel, tensor)

    expected, expected_bins = oracle(numbers(tensor))
    assert_row(row, expected, bounds_for(kernel, dtype))
    assert (bins == expected_bins).all()
    assert torch.equal(bits(tensor), bits(before))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "case", ["normal", "odd ones among many", "far mean", "huge", "ones", "empty", "nan in every block"]
)
def test_without_a_histogram_the_row_is_the_same(kernel, dtype, case):
    tensor = CASES[case].to(dtype)

    row, bins = measured(kernel, tensor, histogram=False)

    assert_row(row, oracle(numbers(tensor))[0], bounds_for(kernel, dtype))
    assert not bins.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_length_up_to_a_few_vectors(native_kernel, dtype):
    values = normal(300).to(dtype)
    arena = native_kernel.arena(301)
    native_kernel.measure([values[:size] for size in range(301)], range(301), arena)

    rows, bins = native_kernel.ship(arena).take()

    for size in range(301):
        expected, expected_bins = oracle(numbers(values[:size]))
        assert_row(rows[size], expected, bounds_for(native_kernel, dtype))
        assert (bins[size] == expected_bins).all()


@pytest.mark.parametrize("size", [2048, 2049, 4095, 4096, 4097, 65535, 65536, 65537, 99_999, 100_000, 131_073])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_lengths_around_blocks_chunks_and_the_threading_threshold(kernel, dtype, size, threads):
    threads(2)
    tensor = (3 + normal(size, seed=size)).to(dtype)

    row, bins = measured(kernel, tensor)

    expected, expected_bins = oracle(numbers(tensor))
    assert_row(row, expected, bounds_for(kernel, dtype))
    assert (bins == expected_bins).all()


@pytest.mark.parametrize("offset", range(1, 8))
def test_memory_need_not_be_aligned(native_kernel, offset):
    tensor = normal(5000).float()[offset:]

    row, bins = measured(native_kernel, tensor)

    expected, expected_bins = oracle(numbers(tensor))
    assert_row(row, expected)
    assert (bins == expected_bins).all()


def test_float64_squares_beyond_float64_are_infinite_and_nothing_else_suffers(kernel):
    row, _ = measured(kernel, torch.tensor([1e200, 3e200], dtype=torch.float64))

    assert row[schema.M2] == math.inf
    assert row[schema.MEAN] == pytest.approx(2e200)
    assert row[schema.ABS_SUM] == pytest.approx(4e200)


FLOATS = st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), max_size=200)


@given(values=FLOATS, repeats=st.integers(1, 30))
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("name", ["native-avx512", "native-avx2", "native-baseline", "torch"])
def test_any_floats(name, values, repeats):
    kernel = make_kernel(name)
    tensor = torch.tensor(values * repeats, dtype=torch.float32)

    row, bins = measured(kernel, tensor)

    expected, expected_bins = oracle(numbers(tensor))
    assert_row(row, expected)
    assert (bins == expected_bins).all()


@given(values=st.lists(st.floats(allow_nan=True, min_value=None, max_value=None), max_size=100))
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("name", ["native-avx512", "native-avx2", "native-baseline", "torch"])
def test_any_doubles_have_exact_counts_and_bins(name, values):
    kernel = make_kernel(name)
    tensor = torch.tensor(values, dtype=torch.float64)

    row, bins = measured(kernel, tensor)

    with np.errstate(all="ignore"):
        counted = np.array(values)
        finite = counted[np.isfinite(counted)]
    assert row[schema.COUNT] == len(values)
    assert schema.finite(row) == len(finite)
    assert row[schema.ZERO] == (finite == 0).sum()
    assert row[schema.GE_ONE] == (np.abs(finite) >= 1).sum()
    assert bins.sum() == (finite != 0).sum()
    if len(finite):
        assert (row[schema.MIN], row[schema.MAX]) == (finite.min(), finite.max())
