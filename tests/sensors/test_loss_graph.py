"""Losses written out by hand, read from the graph of their backward pass."""

from __future__ import annotations

import pytest
import torch
from tests.sensors.watching import Watching
from torch import nn

from sonde.sensors.loss_graph import ModelOutput, read_loss, read_reduction

N, C = 6, 4
LABELS = torch.tensor([0, 1, 2, 3, 0, 1])
ONE_HOT = torch.eye(C)[LABELS]
REAL = torch.linspace(-1, 1, N * C).reshape(N, C)
ROWS = torch.arange(N)


@pytest.fixture
def output():
    torch.manual_seed(0)
    layer = nn.Linear(3, C)
    return layer(torch.randn(N, 3))


def read(root, output):
    return read_loss(root, [ModelOutput.of(output)])


BY_LABEL = {
    "indexed": lambda out: -out.log_softmax(-1)[ROWS, LABELS].mean(),
    "gathered": lambda out: -out.log_softmax(1).gather(1, LABELS[:, None]).squeeze(1).mean(),
    "one hot": lambda out: -(ONE_HOT * out.log_softmax(1)).sum(1).mean(),
    "one hot, turned": lambda out: (-(out.log_softmax(1) * ONE_HOT).sum(-1)).mean(),
    "logsumexp": lambda out: (out.logsumexp(1) - out[ROWS, LABELS]).mean(),
    "logsumexp of means": lambda out: out.logsumexp(1).mean() - out[ROWS, LABELS].mean(),
}


@pytest.mark.parametrize("form", BY_LABEL)
def test_cross_entropy_is_read_with_its_logits_and_labels_however_it_is_written(form, output):
    loss = read(BY_LABEL[form](output), output)
    assert (loss.kind, loss.settings["reduction"], loss.settings["by_hand"]) == ("cross_entropy", "mean", True)
    assert torch.equal(loss.values, output)
    assert torch.equal(loss.target, LABELS)


SQUARES = {
    "power": lambda out: ((out - REAL) ** 2).mean(),
    "turned": lambda out: (REAL - out).pow(2).mean(),
    "square": lambda out: torch.square(out - REAL).mean(),
    "product": lambda out: (lambda each: (each * each).mean())(out - REAL),
}


@pytest.mark.parametrize("form", SQUARES)
def test_squared_errors_are_read_with_output_and_target(form, output):
    loss = read(SQUARES[form](output), output)
    assert (loss.kind, loss.settings["reduction"]) == ("mse_loss", "mean")
    assert torch.equal(loss.values, output)
    torch.testing.assert_close(loss.target, REAL)
    assert loss.shapes == ((N, C), (N, C))


def test_absolute_errors_are_read(output):
    loss = read((output - REAL).abs().sum(), output)
    assert (loss.kind, loss.settings["reduction"]) == ("l1_loss", "sum")


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [
        (lambda each: each.mean(), "mean"),
        (lambda each: each.sum(), "sum"),
        (lambda each: each.sum() / N, "divided"),
        (lambda each: each.sum(1).mean(), "batchmean"),
        (lambda each: each.mean(1).mean(), "mean"),
        (lambda each: each.sum(1).sum(), "sum"),
    ],
)
def test_how_elements_become_one_number_is_reported(reduce, expected, output):
    assert read(reduce((output - REAL) ** 2), output).settings["reduction"] == expected


def test_a_row_subtracted_from_a_column_shows_in_the_shapes(output):
    column = output[:, :1] * 1.0
    loss = read(((column - REAL[:, 0]) ** 2).mean(), column)
    assert loss.shapes == ((N, 1), (N,))
    assert loss.target is None


def test_a_column_compared_with_one_number_is_not_blown_up(output):
    column = output[:, :1] * 1.0
    assert read(((column - 3.0) ** 2).mean(), column).shapes == ((N, 1), (N, 1))


def test_probabilities_whose_logarithm_is_taken_are_read(output):
    p = output.softmax(1)
    loss = read(-(ONE_HOT * torch.log(p + 1e-9)).sum(1).mean(), p)
    assert loss.kind == "nll_loss"
    torch.testing.assert_close(loss.values, (p + 1e-9).log().detach())
    assert torch.equal(loss.target, LABELS)


def test_a_second_softmax_is_given_as_what_the_loss_was_given(output):
    p = output.softmax(1)
    loss = read(-p.log_softmax(1)[ROWS, LABELS].mean(), p)
    assert loss.kind == "cross_entropy"
    assert torch.equal(loss.values, p)


def test_log_probabilities_of_the_model_itself_are_a_likelihood(output):
    logp = output.log_softmax(1)
    loss = read(-logp[ROWS, LABELS].mean(), logp)
    assert (loss.kind, torch.equal(loss.values, logp)) == ("nll_loss", True)


def test_binary_cross_entropy_is_read(output):
    p, y = output[:, 0].sigmoid(), (REAL[:, 0] > 0).float()
    loss = read(-(y * p.log() + (1 - y) * (1 - p).log()).mean(), p)
    assert (loss.kind, loss.settings["reduction"]) == ("binary_cross_entropy", "mean")
    assert torch.equal(loss.values, p)
    assert torch.equal(loss.target, y)


def test_a_term_beside_the_loss_makes_it_a_part(output):
    loss = read(((output - REAL) ** 2).mean() + 0.1 * output.abs().mean(), output)
    assert (loss.kind, loss.settings["reduction"]) == ("mse_loss", "part")


@pytest.mark.parametrize(
    "strange",
    [
        lambda out: -out.mean(),
        lambda out: -(out.log_softmax(1)[ROWS, LABELS] * REAL[:, 0]).mean(),  # a policy gradient
        lambda out: out.log_softmax(1)[ROWS, LABELS].mean(),
        lambda out: (out - out.roll(1, 0)).pow(2).mean(),
        lambda out: out.norm(),
    ],
)
def test_what_is_not_known_for_a_loss_is_not_called_one(strange, output):
    assert read(strange(output), output) is None


def test_what_someone_packs_away_is_not_unpacked(output):
    unpacked = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda kept: unpacked.append(1) or kept):
        root = -output.log_softmax(1)[ROWS, LABELS].mean()
    read(root, output)
    assert not unpacked


def test_the_reduction_of_elements_is_reported(output):
    each = nn.functional.cross_entropy(output, LABELS, reduction="none")
    assert read_reduction(each.sum()) == "sum"
    assert read_reduction((-each).mean()) == "mean"
    assert read_reduction((each * REAL[:, 0]).mean()) is None
    assert read_reduction(each.sum() / 3) is None


def test_a_session_states_a_loss_by_hand_and_its_vital_signs(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(3, C)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(N, 3)
    with Watching(tmp_path, model, optimizer, what=["gradients", "outputs"]) as seen:
        for _ in range(3):
            optimizer.zero_grad()
            output = model(x)
            loss = -output.log_softmax(1)[ROWS, LABELS].mean()
            loss.backward()
            optimizer.step()
    (stated,) = seen.facts.losses
    assert (stated.kind, stated.classes, stated.settings["by_hand"]) == ("cross_entropy", C, True)
    assert seen.means("loss_fn:output")[3] == pytest.approx(loss.item())
    assert seen.means("loss_fn:vital.row_sum")[3] == pytest.approx(output.sum(1).mean().item(), rel=1e-5)
    counts = torch.bincount(LABELS).float()
    entropy = -(counts / N * (counts / N).log()).sum().item()
    assert seen.means("loss_fn:vital.label_entropy")[1] == pytest.approx(entropy, rel=1e-5)


def test_a_reduction_by_hand_of_a_function_s_elements_is_stated(tmp_path):
    model = nn.Linear(3, C)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watching(tmp_path, model, optimizer) as seen:
        nn.functional.cross_entropy(model(torch.randn(N, 3)), LABELS, reduction="none").sum().backward()
        optimizer.step()
    assert [loss.settings["reduction"] for loss in seen.facts.losses] == ["sum"]


def test_a_loss_by_hand_is_seen_in_every_step_of_accumulated_gradients(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watching(tmp_path, model, optimizer, what=["gradients", "outputs"]) as seen:
        for _ in range(3):
            for _ in range(2):
                ((model(torch.randn(N, 3))[:, 0] - REAL[:, 0]) ** 2).mean().div(2).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [(loss.kind, loss.settings["reduction"]) for loss in seen.facts.losses] == [("mse_loss", "divided")]
    assert sorted(seen["loss_fn:input.input"]) == [1, 2, 3]


def test_layers_called_one_by_one_have_the_model_s_input_and_logits(tmp_path):
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(3, 5), nn.Linear(5, C)])
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    x = torch.randn(N, 3)
    with Watching(tmp_path, layers, optimizer, what=["gradients", "outputs"]) as seen:
        for _ in range(4):
            optimizer.zero_grad()
            output = layers[1](layers[0](x).relu())
            (-output.log_softmax(1)[ROWS, LABELS].mean()).backward()
            optimizer.step()
    assert seen.means("(model):input[0]")[4] == pytest.approx(x.mean().item(), abs=1e-6)
    assert seen.means("loss_fn:input.input")[4] == pytest.approx(output.mean().item(), abs=1e-6)
