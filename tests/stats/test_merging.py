"""Rows are merged into, never overwritten: parts measured apart give the row of the whole."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles.rows import assert_row, oracle
from tests.stats.measuring import make_kernel, measured, numbers

from sonde.core import schema

PARTS = {
    "plain": [torch.randn(100), torch.randn(5000) + 3, torch.randn(7)],
    "empty first": [torch.empty(0), torch.randn(10) + 5],
    "empty last": [torch.randn(10) - 5, torch.empty(0)],
    "nothing finite first": [torch.full((5,), math.nan), torch.randn(10) + 5],
    "nothing finite last": [torch.randn(10) + 5, torch.full((5,), math.inf)],
    "all positive": [torch.tensor([3.0, 4.0]), torch.tensor([5.0])],
    "all negative": [torch.tensor([-3.0, -4.0]), torch.tensor([-5.0])],
    "far apart": [torch.full((100,), 1e4), torch.full((100,), -1e4)],
    "many": [torch.tensor([float(i)]) for i in range(50)],
}


@pytest.mark.parametrize("case", PARTS)
def test_parts_in_one_row_make_the_row_of_the_whole(kernel, case):
    parts = PARTS[case]

    row, bins = measured(kernel, *parts)

    expected, expected_bins = oracle(numbers(torch.cat(parts)), tensors=len(parts))
    assert_row(row, expected)
    assert (bins == expected_bins).all()


def test_parts_measured_in_separate_calls_merge_too(kernel):
    parts = [torch.randn(3000) + 2, torch.randn(40), torch.tensor([math.nan, 1.0])]
    arena = kernel.arena(2)

    kernel.measure(parts[:1], [0], arena)
    assert kernel.measure_one(parts[1], 0, arena)
    kernel.measure(parts[2:], [0], arena)

    rows, bins = kernel.ship(arena).take()
    expected, expected_bins = oracle(numbers(torch.cat(parts)), tensors=3)
    assert_row(rows[0], expected)
    assert (bins[0] == expected_bins).all()
    assert not rows[1].any()


def test_many_tensors_go_each_to_its_own_row(kernel):
    tensors = [torch.randn(size) * (size + 1) for size in (0, 1, 5, 64, 100, 4096, 5000)]
    rows = [6, 0, 3, 1, 5, 2, 4]
    arena = kernel.arena(7)

    kernel.measure(tensors, rows, arena)

    measured_rows, measured_bins = kernel.ship(arena).take()
    for tensor, row in zip(tensors, rows, strict=True):
        expected, expected_bins = oracle(numbers(tensor))
        assert_row(measured_rows[row], expected)
        assert (measured_bins[row] == expected_bins).all()


def test_a_shipment_does_not_change_when_the_arena_serves_another_step(kernel):
    arena = kernel.arena(1)
    kernel.measure([torch.ones(3)], [0], arena)
    shipment = kernel.ship(arena)
    arena.reset()
    kernel.measure([torch.zeros(5)], [0], arena)

    rows, bins = shipment.take()
    later_rows, later_bins = kernel.ship(arena).take()

    assert shipment.ready()
    assert (rows[0, schema.COUNT], rows[0, schema.SEEN], bins[0].sum()) == (3, 1, 3)
    assert (later_rows[0, schema.COUNT], later_rows[0, schema.SEEN], later_bins[0].sum()) == (5, 1, 0)


def test_an_arena_says_what_it_holds(kernel):
    arena = kernel.arena(10)

    rows, bins = kernel.ship(arena).take()

    assert arena.capacity == 10
    assert arena.nbytes == 10 * (schema.NUM_COLUMNS + schema.NUM_BINS) * 8
    assert (rows.shape, rows.dtype) == ((10, schema.NUM_COLUMNS), np.float64)
    assert (bins.shape, bins.dtype) == ((10, schema.NUM_BINS), np.uint64)


@pytest.mark.parametrize("row", [-1, 4, 10**12])
def test_a_row_outside_the_arena_is_an_error_and_not_a_crash(native_kernel, row):
    arena = native_kernel.arena(4)

    with pytest.raises(IndexError, match=f"row {row} is outside an arena of 4 rows"):
        native_kernel.measure_one(torch.ones(3), row, arena)
    with pytest.raises(IndexError, match=f"row {row} is outside"):
        native_kernel.measure([torch.ones(3), torch.ones(3)], [0, row], arena)
    with pytest.raises(IndexError, match=f"row {row} is outside"):
        native_kernel.measure_change([torch.ones(3)], [torch.ones(3)], [0], [row], arena)

    assert not arena.rows.any()


def test_lists_of_different_lengths_are_an_error(kernel):
    with pytest.raises(ValueError, match=r"zip|rows"):
        kernel.measure([torch.ones(3)], [0, 1], kernel.arena(2))


@given(
    values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=300),
    cuts=st.lists(st.integers(0, 300), max_size=5),
)
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("name", ["native-avx512", "native-avx2", "native-baseline", "torch"])
def test_it_does_not_matter_where_a_tensor_is_cut(name, values, cuts):
    kernel = make_kernel(name)
    whole = torch.tensor(values)
    edges = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    parts = [whole[start:end] for start, end in pairwise(edges)]

    row, bins = measured(kernel, *parts)

    expected, expected_bins = oracle(numbers(whole), tensors=len(parts))
    assert_row(row, expected)
    assert (bins == expected_bins).all()
