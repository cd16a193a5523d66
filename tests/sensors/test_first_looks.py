"""What is looked at once or only at first: softmaxes in the graph, padding, parameters out of sight, the last step."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.sensors.watching import Watching
from torch import nn

from sonde.sensors.architecture import read_softmaxes
from sonde.sensors.loss_graph import raises_likelihood
from sonde.sensors.targets import _share


def read(loss):
    """Return (dim, summed, used) of every softmax of a graph."""
    return [(each.dim, each.summed, each.used) for each in read_softmaxes(loss, lambda number: "")]


def leaf(*shape):
    return torch.randn(shape, requires_grad=True)


@pytest.mark.parametrize("dim", [-1, 1, 0])
def test_the_softmax_of_an_attention_is_found_with_what_it_is_summed_over(dim):
    h = leaf(4, 6, 8)
    weights = F.dropout((h @ h.transpose(1, 2)).softmax(dim), 0.1)
    assert read((weights @ h).mean()) == [(dim % 3, 2, "weights")]


@pytest.mark.parametrize("dim", [-1, -2])
def test_heads_and_einsum_do_not_hide_it(dim):
    h = leaf(4, 2, 6, 8)
    plain = (h @ h.transpose(-1, -2)).softmax(dim) @ h
    summed = torch.einsum("bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", h, h).softmax(dim), h)
    assert read(plain.mean()) == read(summed.mean()) == [(dim % 4, 3, "weights")]


def test_weights_on_the_right_of_a_product_are_summed_over_their_rows():
    h = leaf(4, 8, 6)
    assert read((h @ (h.transpose(1, 2) @ h).softmax(1)).mean()) == [(1, 1, "weights")]


@pytest.mark.parametrize("dim", [1, 2])
def test_the_classes_of_a_likelihood_are_followed_through_views(dim):
    x, y = leaf(4, 6, 8), torch.zeros(4, 6, dtype=torch.int64)
    logp = x.log_softmax(dim)
    assert read(F.nll_loss(logp.reshape(-1, 8), y.flatten())) == [(dim, 2, "likelihood")]
    assert read(F.nll_loss(logp.transpose(1, 2), y)) == [(dim, 2, "likelihood")]
    assert read(F.nll_loss(logp.permute(0, 2, 1), y)) == [(dim, 2, "likelihood")]


def test_a_softmax_whose_use_is_unknown_is_left_out():
    x = leaf(4, 6)
    assert read((x.softmax(1) * x).mean()) == []
    assert read((x.softmax(1) / x.sum(0)).T.matmul(x).mean()) == []


def test_a_mean_of_log_probabilities_without_a_minus_is_distinguished_from_a_loss_and_from_a_reward():
    x, y = leaf(6, 6), torch.arange(6)
    logp = x.log_softmax(1)
    for right in (logp.gather(1, y[:, None]).mean(), torch.diagonal(logp).mean(), logp[range(6), y].sum() / 6):
        assert raises_likelihood(right)
        assert not raises_likelihood(-right)
        assert not raises_likelihood(right * -1.0)
        assert raises_likelihood(right * 2.0)
        assert raises_likelihood(right / 4)
        assert not raises_likelihood(right * torch.randn(1))
    reward = torch.randn(6)
    assert not raises_likelihood((logp.gather(1, y[:, None]).squeeze(1) * reward).mean())
    assert not raises_likelihood((x - 1).square().mean())


# ---------------------------------------------------------------------- padding


def expected_share(tokens, labels, ignored=-100):
    """Say the same in plain loops."""
    ends = [row[-1] for row in tokens]
    pad = max(sorted(set(ends)), key=ends.count)
    padded = [[token == pad for token in row] for row in tokens]
    closed = all(not (a and not b) for row in padded for a, b in pairwise(row))
    named = {
        label for row, flags in zip(labels, padded, strict=True) for label, flag in zip(row, flags, strict=True) if flag
    }
    started = np.mean([not row[0] for row in padded]) > 0.5
    share = np.mean(padded)
    return share if closed and started and len(named) == 1 and named != {ignored} else 0.0


ROWS = [[5, 3, 0, 0, 0, 0], [4, 2, 7, 0, 0, 0], [6, 0, 0, 0, 0, 0]]
TAGS = [[1, 2, 0, 0, 0, 0], [2, 2, 1, 0, 0, 0], [3, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("tokens", "labels", "ill"),
    [
        (ROWS, TAGS, True),
        (ROWS, [[-100 if tag == 0 else tag for tag in row] for row in TAGS], False),  # it does not count
        (ROWS, [[1, 2, 0, 3, 0, 0], *TAGS[1:]], False),  # it has several labels
        ([[5, 3, 0, 2, 0, 0], *ROWS[1:]], TAGS, False),  # words after it
        ([[0] * 6, [0] * 6, ROWS[0]], TAGS, False),  # mostly empty rows
    ],
)
def test_padding_that_counts_is_what_plain_loops_say(tokens, labels, ill):
    share = _share(torch.tensor(tokens), torch.tensor(labels), -100).item()
    assert share == pytest.approx(expected_share(tokens, labels))
    assert (share > 0.5) is ill


@pytest.mark.parametrize("ignored", [-100, 0])
def test_it_is_written_for_tokens_and_labels_of_a_tagger(tmp_path, ignored):
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watching(tmp_path, model, optimizer) as seen:
        for _ in range(3):
            optimizer.zero_grad()
            logits = model(torch.tensor(ROWS))
            F.cross_entropy(logits.flatten(0, 1), torch.tensor(TAGS).flatten(), ignore_index=ignored).backward()
            optimizer.step()
    share = 0.0 if ignored == 0 else 12 / 18
    assert seen.means("loss_fn:vital.counted_padding") == {step: pytest.approx(share) for step in (1, 2, 3)}


# ---------------------------------------------------------------------- out of sight, and no step


class Listed(nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.heads = keep([nn.Linear(4, 1), nn.Linear(4, 1)])

    def forward(self, x):
        return sum(head(self.body(x)) for head in self.heads)


def use(tmp_path, model, parameters, *, steps=3):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    with Watching(tmp_path, model, optimizer) as seen:
        for _ in range(steps):
            model.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    return [each.name for each in seen.facts.hidden]


@pytest.mark.parametrize(("keep", "ill"), [(list, True), (tuple, True), (nn.ModuleList, False)])
def test_parameters_in_a_plain_list_are_found(tmp_path, keep, ill):
    model = Listed(keep)
    names = ["heads.0.weight", "heads.0.bias", "heads.1.weight", "heads.1.bias"]
    assert use(tmp_path, model, model.parameters()) == (names if ill else [])


def test_a_module_kept_out_of_sight_on_purpose_is_left_alone(tmp_path):
    trained, frozen = Listed(list), Listed(list)
    own = [parameter for head in trained.heads for parameter in head.parameters()]
    assert use(tmp_path / "a", trained, [*trained.parameters(), *own]) == []
    for head in frozen.heads:
        head.requires_grad_(False)
    assert use(tmp_path / "b", frozen, frozen.parameters()) == []


def test_a_run_that_ends_without_a_step_says_that_nothing_was_written_to_the_weights(tmp_path):
    model = nn.Linear(4, 1)
    with Watching(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1)) as seen:
        for _ in range(7):
            model(torch.randn(8, 4)).square().mean().backward()
    assert seen.means("(loop):vital.backwards") == {0: 7.0}
    assert seen.means("(loop):vital.written") == {0: 0.0}


def test_an_average_of_weights_that_never_change_is_not_taken_for_a_step(tmp_path):
    student, teacher = nn.Linear(4, 1), nn.Linear(4, 1).requires_grad_(False)
    both = nn.ModuleDict({"student": student, "teacher": teacher})
    with Watching(tmp_path, both, torch.optim.SGD(student.parameters(), lr=0.1)) as seen:
        for _ in range(7):
            student(torch.randn(8, 4)).square().mean().backward()
            teacher.weight.lerp_(student.weight.detach(), 0.1)
    assert seen.means("(loop):vital.written") == {0: 0.0}


def test_another_optimizer_than_the_one_handed_in_is_the_one_that_is_watched_if_it_steps(tmp_path):
    model = nn.Linear(4, 1)
    handed_in, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    with Watching(tmp_path, model, handed_in) as seen:
        for _ in range(7):
            model(torch.randn(8, 4)).square().mean().backward()
            other.step()
    assert seen.means("(loop):vital.backwards") == dict.fromkeys(range(1, 8), 1.0)
    assert list(seen.means("optimizer.group0.lr:scalar")) == list(range(1, 8))


def test_a_session_in_which_nothing_ran_writes_nothing(tmp_path):
    model = nn.Linear(4, 1)
    with Watching(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1)) as seen:
        pass
    assert "(loop):vital.written" not in seen.keys
