"""Rows are marked by their bits: equal rows alike, different ones not, in any batch and any dtype."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sonde
from sonde.core import signals
from sonde.sensors import data
from sonde.sensors.data import distinct, marks_of


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8]
)
def test_marks_distinguish_rows_like_numpy(dtype):
    torch.manual_seed(0)
    values = torch.randint(0, 3, (400, 5)).to(dtype)
    marks = marks_of(values)
    expected = len(np.unique(values.double().numpy(), axis=0))
    assert len(set(marks.tolist())) == int(distinct(marks)) == expected < 400


def test_a_row_has_the_same_mark_wherever_it_stands():
    x = torch.randn(50, 3, 4, 4)
    order = torch.randperm(50)
    assert torch.equal(marks_of(x)[order], marks_of(x[order]))
    assert torch.equal(marks_of(x)[7:9], marks_of(x[7:9]))
    assert torch.equal(marks_of(x.transpose(1, 3)), marks_of(x.transpose(1, 3).contiguous()))


def test_the_order_of_numbers_within_a_row_counts():
    assert int(distinct(marks_of(torch.tensor([[1.0, 2.0], [2.0, 1.0], [0.0, 3.0]])))) == 3


def test_of_a_large_batch_only_the_first_rows_are_marked(monkeypatch, tmp_path):
    sizes = []
    monkeypatch.setattr(data, "marks_of", lambda values, known: sizes.append(len(values)) or marks_of(values, known))
    model = torch.nn.Linear(3, 1)
    with sonde.watch(model, run=tmp_path / "run", on_error="raise"):
        model(torch.randn(20_000, 3))
        with torch.no_grad():
            model(torch.randn(20_000, 3))
    assert sizes == [data.MAX_MARKS] * 2


def test_of_long_rows_some_columns_count():
    x = torch.zeros(2, 5000)
    x[0, 0] = 1
    assert int(distinct(marks_of(x))) == 2


@pytest.mark.parametrize(("overlap", "share"), [(0, 0.0), (30, 0.5), (60, 1.0)])
def test_evaluation_says_how_many_of_its_rows_were_trained_on(tmp_path, overlap, share):
    torch.manual_seed(0)
    x, model = torch.randn(200, 4), torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = torch.cat([x[:overlap], torch.randn(60 - overlap, 4)])
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise"):
        for start in range(0, 200, 50):
            model(x[start : start + 50]).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            model(held)
    run = sonde.open_run(tmp_path / "run")
    assert run.series(f"(model):vital.{signals.SEEN_ROWS}@eval", "mean").values.tolist() == pytest.approx([share])
    assert set(run.series(f"(model):vital.{signals.REPEATED_ROWS}", "mean").values.tolist()) == {0.0}


def test_different_rows_are_counted_once_there_are_enough(tmp_path):
    torch.manual_seed(0)
    x, model = torch.randn(10, 4), torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise"):
        for _ in range(12):
            model(x[torch.randint(10, (128,))]).square().mean().backward()
            optimizer.step()
    run = sonde.open_run(tmp_path / "run")
    assert run.series(f"(model):vital.{signals.DISTINCT_ROWS}", "mean").values.tolist() == [10.0]
