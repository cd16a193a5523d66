"""Axes taken for one another, targets with a gradient, and rows that are drawn again: each beside one that is well."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from handmade import UNKNOWN, ask, found, loss, model, module, patient
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import sonde
from sonde.core.facts import ColumnFacts, Facts, LoaderFacts, ReshapeFacts

ONE = {"loss:scalar": [1.0] * 4}


def sequence(shape, *, targets=(32,), batch_first=False, inputs=(32, 5)):
    facts = Facts(
        modules=(module("rnn", "LSTM", batch_first=batch_first),),
        losses=(loss("cross_entropy", input_shape=inputs, target_shape=targets),),
    )
    return patient(ONE | {"rnn:output[0]": [1.0] * 4}, facts, about={"rnn:output[0]": {"shape": shape, "kind": "LSTM"}})


def test_a_recurrent_layer_that_runs_along_the_batch_is_named():
    finding = found("batch_axis_mixed", sequence((32, 16, 24)))
    assert (finding.severity, finding.sites) == ("critical", ("rnn",))
    assert "batch_first=True" in finding.fix


@pytest.mark.parametrize(
    "case",
    [
        sequence((16, 32, 24)),  # as it should be
        sequence((32, 16, 24), batch_first=True),
        sequence((32, 1, 24)),  # one long sequence
        sequence((32, 32, 24)),  # cannot be told
        sequence((16, 32, 24), targets=(512,), inputs=(512, 5)),  # an answer for every step
        sequence((32, 16, 24), targets=(32, 16), inputs=(32, 5, 16)),
    ],
)
def test_sequences_along_time_or_of_unknown_layout_are_well(case):
    assert ask("batch_axis_mixed", case) is None


def test_a_view_that_mixes_samples_is_named():
    facts = model("a.weight", reshapes=(ReshapeFacts(before=(16, 32, 24), after=(32, 16, 24), module="head"),))
    finding = found("batch_axis_mixed", patient(ONE, facts))
    assert finding.sites[0] == "head"
    assert "transpose" in finding.fix


def test_a_column_that_meets_a_row_is_a_broadcast_loss():
    facts = model("a.weight", columns=(ColumnFacts(operation="mul", column=(8, 1), result=(8, 8)),))
    assert found("broadcast_loss", patient(ONE, facts)).severity == "critical"
    assert ask("broadcast_loss", patient(ONE, model("a.weight"))) == UNKNOWN


def test_a_target_with_a_gradient_is_named():
    assert "detach" in found("target_not_detached", patient(ONE, model("a.weight", bootstrapped="mse_loss"))).fix
    assert ask("target_not_detached", patient(ONE, model("a.weight"))) is None


def drawn(distinct, *, sampler="WeightedRandomSampler", length=5000):
    facts = model(
        "a.weight", loader=LoaderFacts(kind="DataLoader", settings={"sampler": sampler, "dataset_length": length})
    )
    readings = {"(model):input[0]": [np.arange(32.0)] * 300, "(model):vital.distinct_rows": [None] * 30 + [distinct]}
    return patient(readings, facts)


def test_a_sampler_that_draws_few_of_many_is_named_even_long_after():
    assert found("sampler_draws_few", drawn(10)).sites == ("loader",)


@pytest.mark.parametrize("case", [drawn(900), drawn(10, sampler="RandomSampler"), drawn(40, length=40)])
def test_even_drawing_copies_in_the_data_and_small_data_are_well(case):
    assert ask("sampler_draws_few", case) is None


def evaluated(shares, repeated=0.0, scalar="val_loss"):
    return patient(
        {
            "(model):input[0]": [np.arange(32.0)] * 4,
            "(model):input[0]@eval": [np.arange(16.0)] * 4,
            "(model):vital.seen_rows@eval": shares,
            "(model):vital.repeated_rows": [repeated] * 4,
            f"{scalar}:scalar": [1.0] * 4,
        }
    )


def test_rows_that_were_trained_on_are_a_leak():
    assert found("data_leakage", evaluated([1.0, 0.95, 1.0])).severity == "warning"
    assert found("data_leakage", evaluated([1.0, 0.95, 1.0], scalar="accuracy")).severity == "info"


@pytest.mark.parametrize("case", [evaluated([0.0] * 4), evaluated([1.0, 0.0] * 2), evaluated([1.0] * 4, repeated=0.5)])
def test_other_rows_and_rows_of_few_values_are_no_leak(case):
    assert ask("data_leakage", case) is None


def test_attention_weights_begin_with_the_batch_in_every_layout(tmp_path):
    torch.manual_seed(0)
    net = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2), "out": nn.Linear(4, 2)})
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with sonde.watch(net, optimizer, run=tmp_path / "run", on_error="raise") as session:
        for _ in range(4):
            x, y = torch.randn(8, 32, 4), torch.randint(0, 2, (32,))
            loss = F.cross_entropy(net["out"](net["attention"](x, x, x)[0].mean(0)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert "batch_axis_mixed" not in [finding.kind for finding in session.findings]


@pytest.mark.parametrize("batch_first", [False, True])
def test_it_is_found_in_a_program(tmp_path, batch_first):
    torch.manual_seed(0)
    x, y = torch.randn(64, 7, 3), torch.randint(2, (64,))
    net = nn.ModuleDict({"rnn": nn.GRU(3, 5, batch_first=batch_first), "out": nn.Linear(5, 2)})
    optimizer = torch.optim.Adam(net.parameters())
    with sonde.watch(net, optimizer, run=tmp_path / "run", on_error="raise") as session:
        for start in range(0, 64, 16):
            rows = slice(start, start + 16)
            loss = F.cross_entropy(net["out"](net["rnn"](x[rows])[0][:, -1]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    assert ("batch_axis_mixed" in [finding.kind for finding in session.findings]) is not batch_first


@pytest.mark.parametrize("by_class", [True, False])
def test_weights_of_classes_are_not_weights_of_samples(tmp_path, by_class):
    torch.manual_seed(0)
    x, y = torch.randn(600, 4), torch.randint(3, (600,))
    weights = torch.ones(3) if by_class else torch.ones(600)
    loader = DataLoader(TensorDataset(x, y), batch_size=60, sampler=WeightedRandomSampler(weights, 1200))
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with sonde.watch(net, optimizer, loader=loader, run=tmp_path / "run", on_error="raise") as session:
        for rows, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(rows), labels).backward()
            optimizer.step()
    assert ("sampler_draws_few" in [finding.kind for finding in session.findings]) is by_class
