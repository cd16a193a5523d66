"""Every kernel, every dtype it reads, every kind of data that once went wrong: against the oracle."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles.rows import assert_row, oracle
from tests.stats.cases import CASES, normal
from tests.stats.measuring import bits, bounds_for, make_kernel, measured, numbers

from sonde.core import schema

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


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
