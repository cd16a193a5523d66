"""Mistakes that one look at the graph or at the first batches tells, and look-alikes that are well."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from handmade import UNKNOWN, ask, found, loss, model, patient
from tests.sensors.watching import Watching
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sonde
from sonde.core.facts import LIKELIHOOD, Facts, HiddenFacts, SoftmaxFacts

ONE = {"loss:scalar": [1.0, 1.0]}


def softmax(shape, dim, summed, used="weights", **more):
    return patient(
        ONE, model("a.weight", softmaxes=(SoftmaxFacts(shape=shape, dim=dim, summed=summed, used=used, **more),))
    )


@pytest.mark.parametrize(
    "case",
    [
        softmax((8, 5, 5), 1, 2, module="block.attention"),  # over the queries
        softmax((8, 4, 5, 5), 2, 3),
        softmax((8, 4, 5, 5), 1, 3),  # over the heads
        softmax((8, 5, 7), 0, 2),  # over the batch
        softmax((8, 5, 9), 1, 2, used="likelihood", logarithm=True),  # over time
    ],
)
def test_a_softmax_over_another_dimension_than_it_is_used_along_is_named(case):
    finding = found("wrong_dim_softmax", case)
    assert finding.severity == "critical"
    assert "dim=-1" in finding.fix


def test_it_is_placed_where_the_graph_says():
    assert found("wrong_dim_softmax", softmax((8, 5, 5), 1, 2, module="block.attention")).sites == ("block.attention",)


@pytest.mark.parametrize(
    ("shape", "dim", "summed", "used"),
    [
        ((8, 5, 5), 2, 2, "weights"),
        ((8, 64, 100), 1, 2, "weights"),  # pixels are shared out among 64 centres
        ((32, 5), 1, 0, "weights"),  # samples are shared out among 5 centres
        ((32, 5), 1, 1, "likelihood"),
        ((1, 5, 7), 0, 2, "weights"),
        ((8, 4, 5, 9), 1, 3, "weights"),  # what is shared out among four need not be attention
    ],
)
def test_attention_and_clusterings_are_well(shape, dim, summed, used):
    assert ask("wrong_dim_softmax", softmax(shape, dim, summed, used)) in (None, UNKNOWN)


def test_parameters_in_a_plain_list_are_named():
    facts = model("a.weight", hidden=(HiddenFacts(name="heads.0.weight", shape=(4, 1), reached=True),))
    finding = found("params_not_in_optimizer", patient({"loss:scalar": [1.0] * 3}, facts))
    assert finding.sites == ("heads.0.weight",)
    assert "ModuleList" in finding.fix


@pytest.mark.parametrize(("share", "severity"), [(0.8, "warning"), (0.3, None)])
def test_padding_that_counts_is_a_warning(share, severity):
    readings = {"loss_fn:vital.counted_padding": [share] * 4, "loss_fn:vital.valid_targets": [100.0] * 4}
    finding = ask("padding_dominates", patient(readings, model("a.weight", losses=(loss("cross_entropy"),))))
    assert (None if finding is None else finding.severity) == severity


@pytest.mark.parametrize(("written", "ill"), [(0.0, {"step_not_called"}), (2.0, set())])
def test_steps_that_cannot_be_seen_are_not_judged(written, ill):
    readings = {"(loop):vital.backwards": [40.0], "(loop):vital.written": [written]}
    case = patient(
        readings, model("a.weight", kind="Adam"), final=True, first_step=0
    )  # a run without a step has step 0
    said = {kind for kind in ("step_not_called", "momentum_state_stale") if ask(kind, case) not in (None, UNKNOWN)}
    assert said == ill


# ---------------------------------------------------------------------- signs


def test_log_probabilities_that_are_made_small_are_a_flipped_sign():
    facts = model("a.weight", losses=(loss(LIKELIHOOD),))
    assert found("loss_sign_flipped", patient({"loss:scalar": [-1.0] * 5}, facts)).sites == ("loss_fn",)


def course(start, end, steps=60, noise=0.02, seed=0):
    wobble = np.random.default_rng(seed).normal(size=steps) * noise
    return (np.linspace(start, end, steps) + wobble).tolist()


@pytest.mark.parametrize(
    ("name", "score", "losses", "ill"),
    [
        ("reward", course(0.3, 0.01), course(0.0, 0.0), True),
        ("train/accuracy", course(0.9, 0.5), course(1.0, 0.8), True),
        ("reward", course(0.1, 0.8), course(0.0, 0.0), False),
        ("accuracy", course(0.9, 0.4), course(0.5, 1.5), False),  # harder samples: the loss rises with it
        ("accuracy", course(0.5, 0.5, noise=0.2), course(1.0, 0.8), False),
        ("error_score", course(0.9, 0.1), course(1.0, 0.1), False),
        ("map_loss", course(0.9, 0.1), course(1.0, 0.1), False),
    ],
)
def test_a_score_that_falls_while_the_loss_does_not_rise_is_a_flipped_sign(name, score, losses, ill):
    case = patient({"loss:scalar": losses, f"{name}:scalar": score}, model("a.weight"))
    assert (ask("loss_sign_flipped", case) is not None) is ill


@pytest.mark.parametrize(("name", "ill"), [("dice", False), ("reward", True)])
def test_a_number_that_falls_with_a_loss_of_torchs_is_a_term_of_it_unless_it_is_earned(name, ill):
    readings = {"loss:scalar": course(1.6, 0.4), f"{name}:scalar": course(0.9, 0.2), "loss_fn:output": course(0.7, 0.2)}
    assert (ask("loss_sign_flipped", patient(readings, model("a.weight"))) is not None) is ill


# ---------------------------------------------------------------------- parts of a loss


def parts(reconstruction, added, factor=1.0):
    total = [factor * one + other for one, other in zip(reconstruction, added, strict=True)]
    readings = {
        "loss_fn:output": reconstruction,
        "(loop):vital.root": [value if at < 8 or at % 7 == 0 else None for at, value in enumerate(total)],
        "loss_fn:vital.target_spread": [1.0] * len(total),
    }
    about = {"loss_fn:output": {"kind": "mse_loss"}}
    return patient(readings, model("a.weight", losses=(loss("mse_loss"),)), about=about)


FLAT, FALLING = course(1.0, 1.0, 80), course(1.0, 0.1, 80)
FADING = (30 * np.exp(-np.arange(80) / 20)).tolist()


@pytest.mark.parametrize(
    ("case", "ill"),
    [
        (parts(FLAT, FADING), True),
        (parts(course(2.0, 1.0, 80), FADING), True),  # down to a guess that ignores the input
        (parts(FALLING, FADING), False),
        (parts(FLAT, [0.0] * 80, factor=100.0), False),  # a plain factor
        (parts(FLAT, course(0.0, 5.0, 80)), False),  # weighed in slowly
        (parts(FLAT, [0.5] * 80), False),
    ],
)
def test_an_added_term_that_drowns_the_loss_is_named(case, ill):
    finding = ask("aux_loss_dominates", case)
    assert (finding is not None) is ill
    if ill:
        assert found("aux_loss_dominates", case).sites == ("loss_fn",)


def test_without_a_loss_function_nothing_is_reported():
    assert ask("aux_loss_dominates", patient({"loss:scalar": [1.0] * 80}, Facts())) == UNKNOWN


@pytest.mark.parametrize(("zeros", "ill"), [(0.5, True), (0.0, False)])
def test_probabilities_that_were_cut_off_are_not_squashed(zeros, ill):
    batches = [np.clip(np.random.default_rng(at).normal(size=(16, 5)), 0 if ill else 0.01, 0.99) for at in range(4)]
    readings = {
        "loss_fn:input.input": batches,
        "loss_fn:vital.zero_share": [zeros] * 4,
    }
    about = {"loss_fn:input.input": {"kind": "binary_cross_entropy", "dtype": "float32"}}
    case = patient(readings, model("a.weight", losses=(loss("binary_cross_entropy"),)), about=about)
    assert (ask("logits_into_prob_loss", case) is not None) is ill


# ---------------------------------------------------------------------- states and micro-batches


@pytest.mark.parametrize(
    ("shuffle", "carried", "said"), [(True, True, "warning"), (False, True, None), (True, False, None)]
)
def test_a_state_that_goes_on_to_shuffled_samples_is_found(tmp_path, shuffle, carried, said):
    torch.manual_seed(0)
    rnn, head = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 1)
    network = nn.ModuleList([rnn, head])
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(40, 5, 2), torch.randn(40, 5)), batch_size=8, shuffle=shuffle)
    session = sonde.watch(network, optimizer, loader=loader, run=tmp_path / "run", on_error="raise")
    state = None
    with session:
        for x, y in loader:
            out, (h, c) = rnn(x, state)
            state = (h.detach(), c.detach()) if carried else None
            optimizer.zero_grad()
            F.mse_loss(head(out).squeeze(-1), y).backward()
            optimizer.step()
    found = [finding for finding in session.findings if finding.kind == "rnn_state_not_reset"]
    assert [finding.severity for finding in found] == ([said] if said else [])
    assert all(finding.sites[0] == "0" for finding in found)


@pytest.mark.parametrize("carries", [False, True])
def test_a_decoder_that_goes_on_within_a_step_carries_nothing(tmp_path, carries):
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(2, 4)

        def forward(self, state):
            for _ in range(3):
                state = self.cell(torch.randn(3, 2), state)
            return state

    decoder = Decoder()
    optimizer = torch.optim.SGD(decoder.parameters(), lr=0.1)
    state = torch.zeros(3, 4)
    with Watching(tmp_path, decoder, optimizer) as seen:
        for _ in range(2):
            state = decoder(state.detach() if carries else torch.zeros(3, 4))
            state.sum().backward()
            optimizer.step()
    assert seen.facts.carried == (("cell",) if carries else ())


@pytest.mark.parametrize(
    ("counts", "reduction", "said"),
    [([10, 40], "mean", "warning"), ([10, 18], "mean", "info"), ([10, 11], "mean", None), ([10, 40], "sum", None)],
)
def test_means_over_unequal_numbers_of_targets_are_reported(counts, reduction, said):
    readings = {"loss_fn:vital.valid_targets": [counts] * 3, "(loop):vital.backwards": [2.0] * 3}
    facts = model("a.weight", losses=(loss("cross_entropy", settings={"reduction": reduction}),))
    finding = ask("token_mean_of_means", patient(readings, facts))
    assert (None if finding is None else finding.severity) == said


def test_what_is_not_finite_sums_to_nothing():
    nothing = [np.full(5, np.nan)] * 4
    readings = {"loss_fn:input.input": [np.full((4, 5), np.nan)] * 4, "loss_fn:vital.sample_spread": [1.0] * 4}
    readings |= {f"loss_fn:vital.{name}": nothing for name in ("column_sum", "row_sum", "column_log_z")}
    readings["loss_fn:vital.log_z"] = [np.ones(4)] * 4
    about = {"loss_fn:input.input": {"kind": "cross_entropy", "dtype": "float32"}}
    facts = Facts(losses=(loss("cross_entropy", classes=5),))
    assert ask("wrong_dim_softmax", patient(readings, facts, about=about)) is None
