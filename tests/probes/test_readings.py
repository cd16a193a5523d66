"""Statistics on request are those that numpy computes, in one transfer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from sonde.probes.readings import Tally, read_gradients, read_parameters, readings_of, total_norm
from sonde.records import Reading


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_readings_agree_with_numpy(dtype):
    torch.manual_seed(0)
    values = (torch.randn(37, 5) * 3).to(dtype)
    reading, oracle = readings_of({"x": values})["x"], Reading.of(values.double().numpy())
    for measure in ("count", "mean", "std", "min", "max", "norm", "zero"):
        assert reading.get(measure) == pytest.approx(oracle.get(measure), rel=1e-5), measure
    assert reading.bins.sum() == (values != 0).sum()


def test_a_tally_takes_more_tensors_than_one_arena_holds_and_keeps_their_order():
    tally = Tally(histogram=False)
    for value in range(300):
        tally.add(torch.full((2,), float(value)))
    tally.add_all([torch.full((1,), 1000.0 + index) for index in range(300)])
    assert [reading.mean for reading in tally.readings()] == [
        *map(float, range(300)),
        *(1000.0 + i for i in range(300)),
    ]


def test_a_tensor_without_memory_has_no_reading():
    found = readings_of({"meta": torch.ones(2, device="meta"), "real": torch.ones(2)})
    assert list(found) == ["real"]


def test_gradients_and_parameters_are_read_by_name_without_touching_them():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[1].weight = nn.Parameter(torch.zeros(2, 4))
    model(torch.randn(5, 3)).square().sum().backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    gradients = read_gradients(model)
    assert set(gradients) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    plain = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).double()
    assert total_norm(gradients.values()) == pytest.approx(float(plain.norm()), rel=1e-6)
    assert read_parameters(model)["1.weight"].get("zero") == 8
    assert all(torch.equal(a, b.grad) for a, b in zip(before, model.parameters(), strict=True))


def test_the_total_norm_is_not_finite_if_an_element_is_not():
    good, nan, inf = Reading.of([1.0]), Reading.of([1.0, math.nan]), Reading.of([math.inf])
    assert math.isnan(total_norm([good, nan, inf]))
    assert total_norm([good, inf]) == math.inf
    assert total_norm([]) == 0.0
    assert total_norm([Reading.of([]), Reading.of([2.0])]) == 2.0


def test_sparse_gradients_count_their_implicit_zeros():
    layer = nn.Embedding(10, 4, sparse=True)
    layer(torch.tensor([1, 2])).sum().backward()
    reading = read_gradients(layer)["weight"]
    assert reading.count == 40
    assert reading.norm == pytest.approx(np.sqrt(8))
