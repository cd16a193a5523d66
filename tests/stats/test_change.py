"""The change pass: a tensor, its distance to its shadow, and the shadow brought up to date."""

from __future__ import annotations

import math

import pytest
import torch
from tests.oracles.rows import assert_row, oracle
from tests.stats.measuring import bits, bounds_for, numbers

from sonde.core import schema

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def pair(size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    shadow = torch.randn(size, generator=generator, dtype=torch.float64)
    return (shadow + 1e-2 * torch.randn(size, generator=generator)).to(dtype), shadow.to(dtype)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def change_of(kernel, tensor, shadow, histogram=True):
    arena = kernel.arena(3)
    kernel.measure_change([tensor], [shadow], [0], [2], arena, histogram=histogram)
    rows, bins = kernel.ship(arena).take()
    assert not rows[1].any()
    return rows[[0, 2]], bins[[0, 2]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 63, 64, 1000, 4096, 5000, 70_000, 150_001])
def test_both_rows_are_the_oracles_and_the_shadow_follows(kernel, dtype, size, threads):
    threads(2)
    tensor, shadow = pair(size, dtype)
    before, change = tensor.clone(), wide(tensor) - wide(shadow)

    rows, bins = change_of(kernel, tensor, shadow)

    for row, its_bins, values in zip(rows, bins, (tensor, change), strict=True):
        expected, expected_bins = oracle(numbers(values))
        assert_row(row, expected, bounds_for(kernel, dtype))
        assert (its_bins == expected_bins).all()
    assert torch.equal(bits(tensor), bits(before))
    assert torch.equal(bits(shadow), bits(before))


def test_odd_values_are_carried_over_bit_by_bit(kernel):
    tensor = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e-45, 1.0, math.inf])
    shadow = torch.tensor([1.0, 1.0, math.inf, 0.0, 0.0, math.nan, math.inf])
    change = tensor - shadow

    rows, bins = change_of(kernel, tensor, shadow)

    assert torch.equal(bits(shadow), bits(tensor))
    for row, its_bins, values in zip(rows, bins, (tensor, change), strict=True):
        expected, expected_bins = oracle(numbers(values))
        assert_row(row, expected)
        assert (its_bins == expected_bins).all()


def test_without_a_histogram_there_are_no_bins(kernel):
    tensor, shadow = pair(5000, torch.float32)

    rows, bins = change_of(kernel, tensor, shadow, histogram=False)

    assert_row(rows[0], oracle(numbers(tensor))[0])
    assert not bins.any()


def test_nothing_changed(kernel):
    tensor, _ = pair(5000, torch.float32)

    rows, bins = change_of(kernel, tensor, tensor.clone())

    assert rows[1, schema.ZERO] == rows[1, schema.COUNT] == 5000
    assert not rows[1, schema.MIN :].any()
    assert not bins[1].any()


LAYOUTS = {
    "transposed": lambda values: values.reshape(40, 30).t(),
    "channels last": lambda values: values.reshape(2, 3, 10, 20).to(memory_format=torch.channels_last),
    "scalar": lambda values: values[0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dense_layouts_are_read_in_place(kernel, layout):
    tensor, shadow = (LAYOUTS[layout](values) for values in pair(1200, torch.float32))
    change = tensor - shadow

    rows, _ = change_of(kernel, tensor, shadow)

    assert_row(rows[0], oracle(numbers(tensor))[0])
    assert_row(rows[1], oracle(numbers(change))[0])
    assert torch.equal(shadow, tensor)


@pytest.mark.parametrize(
    ("tensor", "shadow"),
    [
        (torch.randn(30, 40).t(), torch.randn(40, 30)),
        (torch.randn(40, 60)[:, ::2], torch.randn(40, 30)),
        (torch.randn(40, 30), torch.randn(40, 60)[:, ::2]),
        (torch.randn(1, 3).expand(40, 3), torch.randn(40, 3)),
        (torch.randn(40, dtype=torch.complex64), torch.randn(40, dtype=torch.complex64)),
        (torch.randn(40, dtype=torch.complex64).conj(), torch.randn(40, dtype=torch.complex64)),
        (torch.randint(-9, 9, (40,)), torch.randint(-9, 9, (40,))),
        (torch.randn(40).to(torch.float8_e4m3fn), torch.randn(40).to(torch.float8_e4m3fn)),
        (torch.randn(40).bfloat16(), torch.randn(40)),
    ],
    ids=["other order", "strided", "strided shadow", "expanded", "complex", "conjugated", "integer", "float8", "mixed"],
)
def test_pairs_that_lie_differently_are_subtracted_all_the_same(kernel, tensor, shadow):
    shadow = shadow.clone() if shadow.is_contiguous() else shadow
    now, before = (
        torch.view_as_real(each.resolve_conj()).double() if each.is_complex() else each.double()
        for each in (tensor, shadow)
    )
    change = now - before

    rows, _ = change_of(kernel, tensor, shadow)

    assert_row(rows[0], oracle(numbers(now))[0])
    # The difference is taken in float32, so it is rounded once.
    assert rows[1, schema.COUNT] == change.numel()
    assert rows[1, schema.ABS_SUM] == pytest.approx(float(change.abs().sum()), rel=1e-5)
    assert torch.equal(shadow.to(torch.complex128), tensor.to(torch.complex128))


def test_a_sparse_tensor_is_measured_but_its_change_is_not(kernel):
    tensor = torch.eye(4).to_sparse()
    shadow = torch.zeros(4, 4).to_sparse()

    rows, _ = change_of(kernel, tensor, shadow)

    assert rows[0, schema.COUNT] == 16
    assert not rows[1].any()


def test_parameters_that_need_gradients_and_their_versions_are_left_alone(kernel):
    parameter = torch.nn.Parameter(torch.randn(5000))
    shadow = parameter.detach().clone()
    version = parameter._version

    change_of(kernel, parameter, shadow)

    assert parameter._version == version
    assert parameter.requires_grad
    assert not shadow.requires_grad


def test_many_pairs_at_once(kernel):
    pairs = [pair(size, torch.float32) for size in (10, 5000, 0, 300)]
    changes = [tensor - shadow for tensor, shadow in pairs]
    arena = kernel.arena(8)

    kernel.measure_change(
        [tensor for tensor, _ in pairs], [shadow for _, shadow in pairs], [0, 2, 4, 6], [1, 3, 5, 7], arena
    )

    rows, _ = kernel.ship(arena).take()
    for i, (tensor, shadow) in enumerate(pairs):
        assert_row(rows[2 * i], oracle(numbers(tensor))[0])
        assert_row(rows[2 * i + 1], oracle(numbers(changes[i]))[0])
        assert torch.equal(shadow, tensor)
