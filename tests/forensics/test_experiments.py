"""Experiments: each tells a program with a fault from its healthy twin, and its numbers are those of the theory."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from tests.forensics.taped import taped
from torch import nn

import sonde
from sonde.core import tape as tapes
from sonde.errors import OptionError
from sonde.forensics.experiments import examine

CLASSES = 5


@pytest.fixture
def data():
    torch.manual_seed(0)
    x = torch.randn(32, 20)
    return x, x[:, :CLASSES].argmax(1)


def net(outputs=CLASSES, *end):
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, outputs), *end)


def measure(folder, experiment, model, loss_fn, x, y, optimizer=None):
    found = examine(taped(folder / "run", model, loss_fn, x, y, optimizer), only=[experiment], seconds=100)
    assert not found.note
    (result,) = found.results
    assert not result.skipped, result.skipped
    return result


# ---------------------------------------------------------------- free outputs


def test_a_loss_over_softmax_has_the_floor_that_theory_gives(tmp_path, data):
    well = measure(tmp_path / "well", "free_outputs", net(), F.cross_entropy, *data)
    ill = measure(tmp_path / "ill", "free_outputs", net(CLASSES, nn.Softmax(-1)), F.cross_entropy, *data)
    assert ill.number("scores.lowest") == pytest.approx(math.log(1 + (CLASSES - 1) / math.e), rel=1e-3)
    assert ill.number("loss_inputs.lowest") < 1e-3
    assert "_softmax" in ill.words["between"]
    assert well.number("scores.lowest") < 1e-3
    assert well.number("scores.agreement_after") == 1.0


def test_the_best_guess_is_the_entropy_of_the_classes(tmp_path, data):
    counts = torch.bincount(data[1], minlength=CLASSES) / len(data[1])
    well = measure(tmp_path, "free_outputs", net(), F.cross_entropy, *data)
    assert well.number("guess") == pytest.approx(-float((counts * counts.log()).nansum()), rel=1e-3)


def test_a_loss_of_the_wrong_sign_has_no_bottom_and_leads_away_from_the_targets(tmp_path, data):
    ill = measure(tmp_path, "free_outputs", net(), lambda a, b: -F.cross_entropy(a, b), *data)
    assert ill.number("scores.unbounded") == 1
    assert ill.number("scores.agreement_after") == 0


def test_outputs_that_are_compared_with_all_targets_can_only_reach_their_variance(tmp_path, data):
    def loss_fn(output, target):  # F.mse_loss would warn
        return (output - target).square().mean()

    y = 3 * data[0][:, :1]
    well = measure(tmp_path / "well", "free_outputs", net(1), loss_fn, data[0], y)
    ill = measure(tmp_path / "ill", "free_outputs", net(1), loss_fn, data[0], y[:, 0])
    assert ill.number("outputs.lowest") == pytest.approx(float(y.var(correction=0)), rel=1e-3)
    assert ill.number("outputs.agreement_after") < 0.5 < well.number("outputs.agreement_after")
    assert ill.words["shapes"] == "[32, 1] and [32]"
    assert "shapes" not in well.words


def test_targets_out_of_the_range_of_the_last_activation_cannot_be_reached(tmp_path, data):
    y = data[0][:, :1]
    ill = measure(tmp_path / "ill", "free_outputs", net(1, nn.ReLU()), F.mse_loss, data[0], y)
    well = measure(tmp_path / "well", "free_outputs", net(1, nn.ReLU()), F.mse_loss, data[0], y.abs())
    assert ill.number("scores.lowest") == pytest.approx(float(y.clamp(max=0).square().mean()), rel=1e-3)
    assert well.number("scores.lowest") < 1e-6


# ---------------------------------------------------------------- information


@pytest.mark.parametrize(("knows", "least", "most"), [(True, 10, 1000), (False, -4, 4)])
def test_permuted_targets_cost_only_a_model_that_knows_them(tmp_path, knows, least, most):
    labels = torch.arange(32) % CLASSES
    inputs = torch.nn.functional.one_hot(labels, 20).float() if knows else torch.randn(32, 20)
    model = nn.Linear(20, CLASSES)
    with torch.no_grad():
        model.weight.copy_(5 * torch.eye(CLASSES, 20))
    found = measure(tmp_path, "information", model, F.cross_entropy, inputs, labels)
    assert least < found.number("rise") < most
    assert found.number("permuted") == pytest.approx(
        found.number("start") + found.number("rise") * found.number("scatter")
    )


def test_targets_that_are_all_the_same_cannot_be_permuted(tmp_path, data):
    labels = torch.zeros(32, dtype=torch.long)
    (found,) = examine(taped(tmp_path, net(CLASSES), F.cross_entropy, data[0], labels), only=["information"]).results
    assert found.skipped == "all samples have the same target"


# ---------------------------------------------------------------- dependence


class Mixes(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim, self.first, self.last = dim, nn.Linear(20, 16), nn.Linear(16, CLASSES)

    def forward(self, x):
        h = self.first(x)
        return self.last((h - h.mean(self.dim, keepdim=True)).relu())


def test_samples_that_depend_on_each_other_are_distinguished_from_those_that_do_not(tmp_path, data):
    assert measure(tmp_path / "ill", "dependence", Mixes(0), F.cross_entropy, *data).number("other_samples") > 1e-3
    assert measure(tmp_path / "well", "dependence", Mixes(1), F.cross_entropy, *data).number("other_samples") == 0


def test_batch_norm_does_not_count_as_mixing(tmp_path, data):
    model = nn.Sequential(nn.Linear(20, 16), nn.BatchNorm1d(16), nn.Linear(16, CLASSES))
    assert measure(tmp_path, "dependence", model, F.cross_entropy, *data).number("other_samples") == 0


class Language(nn.Module):
    def __init__(self, *, both_ways):
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.cell = nn.GRU(8, 8, batch_first=True, bidirectional=both_ways)
        self.last = nn.Linear(16 if both_ways else 8, 20)

    def forward(self, x):
        return self.last(self.cell(self.words(x))[0]).transpose(1, 2)


@pytest.mark.parametrize("both_ways", [False, True])
def test_an_output_that_sees_its_target_is_distinguished_from_one_that_does_not(tmp_path, both_ways):
    torch.manual_seed(0)
    words = torch.randint(20, (8, 13))
    model = Language(both_ways=both_ways)
    found = measure(tmp_path, "dependence", model, F.cross_entropy, words[:, :-1].clone(), words[:, 1:].clone())
    assert found.number("shift") == 1
    assert (found.number("future") > 1e-3) == both_ways


class TwoInputs(nn.Module):
    def __init__(self, *, uses_mask):
        super().__init__()
        self.uses_mask, self.first, self.last = uses_mask, nn.Linear(20, 16), nn.Linear(16, CLASSES)

    def forward(self, x, mask):
        h = self.first(x).relu()
        return self.last(h * mask if self.uses_mask else h)


@pytest.mark.parametrize("uses_mask", [False, True])
def test_an_input_without_an_effect_is_distinguished_from_one_that_has_one(tmp_path, data, uses_mask):
    mask = (torch.rand(32, 16) > 0.5).float()
    found = measure(tmp_path, "dependence", TwoInputs(uses_mask=uses_mask), F.cross_entropy, (data[0], mask), data[1])
    assert (found.number("inputs"), found.number("ignored")) == (2, 0 if uses_mask else 1)


class ReturnsItsLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x, labels):
        scores = self.net(x)
        return scores, F.cross_entropy(scores, labels)


def test_labels_of_a_model_that_returns_its_loss_have_an_effect(tmp_path, data):
    found = measure(tmp_path, "dependence", ReturnsItsLoss(), lambda out, y: out[1], data, data[1])
    assert found.number("ignored") == 0


class Attends(nn.Module):
    def __init__(self, *, positions):
        super().__init__()
        self.words, self.places = nn.Embedding(20, 16), nn.Embedding(10, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.out, self.positions = nn.Linear(16, 3), positions

    def forward(self, x):
        h = self.words(x)
        if self.positions:
            h = h + self.places(torch.arange(x.shape[1]))
        return self.out(self.layer(h))


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("pooled", [False, True])
def test_a_model_that_cannot_see_the_order_of_tokens_is_distinguished(tmp_path, positions, pooled):
    tokens = torch.randint(0, 20, (32, 10))
    labels = (tokens[:, 0] + tokens[:, -1]) % 3 if pooled else tokens % 3

    def loss_fn(output, target):
        return F.cross_entropy(output.mean(1) if pooled else output.flatten(0, 1), target.flatten())

    found = measure(tmp_path, "dependence", Attends(positions=positions), loss_fn, tokens, labels)
    assert (found.number("order") > 1e-4) is positions


def test_a_gate_that_starts_at_zero_does_not_make_its_input_ignored(tmp_path, data):
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.first, self.last = nn.Parameter(torch.zeros(())), nn.Linear(20, 16), nn.Linear(16, CLASSES)

        def forward(self, x):
            return self.last(self.gate * self.first(x))

    model = Gated()
    found = measure(tmp_path, "dependence", model, F.cross_entropy, *data, torch.optim.SGD(model.parameters(), lr=0.0))
    assert found.number("ignored") == 0


# ---------------------------------------------------------------- descent


class Cut(nn.Module):
    def __init__(self, *, cut):
        super().__init__()
        self.cut, self.first, self.last = cut, nn.Linear(20, 16), nn.Linear(16, CLASSES)

    def forward(self, x):
        h = self.first(x)
        return self.last((h.detach() if self.cut else h).relu())


@pytest.mark.parametrize("cut", [False, True])
def test_parameters_with_an_effect_and_no_gradient_are_found(tmp_path, data, cut):
    found = measure(tmp_path, "descent", Cut(cut=cut), F.cross_entropy, *data)
    assert found.words.get("without_gradient", "") == ("first.weight, first.bias" if cut else "")


def test_the_update_is_best_at_a_fraction_of_its_length_if_the_rate_is_too_high(tmp_path, data):
    high, usual = net(), net()
    ill = measure(tmp_path / "ill", "descent", high, F.cross_entropy, *data, torch.optim.SGD(high.parameters(), lr=50))
    well = measure(tmp_path / "well", "descent", usual, F.cross_entropy, *data)
    assert ill.number("best_factor") <= 0.1
    assert ill.number("loss.1") > ill.number("start")
    assert well.number("best_factor") >= 1
    assert well.number("loss.1") < well.number("start")
    assert well.number("slope") == pytest.approx(-0.1 * well.number("gradient") ** 2, rel=1e-4)  # plain SGD


# ---------------------------------------------------------------- learnability

FAULTS = {
    "": ({"lr": 0.1}, torch.optim.SGD, 1.0),
    "no weight decay": ({"lr": 1e-3, "weight_decay": 300.0}, torch.optim.AdamW, 1.0),
    "learning rate x 0.01": ({"lr": 50.0, "momentum": 0.9}, torch.optim.SGD, 1.0),
    "learning rate x 10000": ({"lr": 1e-5}, torch.optim.SGD, 1.0),
    "standardised inputs": ({"lr": 0.1}, torch.optim.SGD, 1000.0),
}


@pytest.mark.parametrize("change", FAULTS)
def test_one_change_turns_failing_into_learning(tmp_path, data, change):
    settings, kind, scale = FAULTS[change]
    model = net()
    found = measure(
        tmp_path, "learnability", model, F.cross_entropy, scale * data[0], data[1], kind(model.parameters(), **settings)
    )
    skills = found.part("skill")
    learnt = [name for name, skill in skills.items() if skill >= 0.5]
    if not change:
        assert learnt == ["as is"]
    else:
        assert skills["as is"] < 0.1
        assert change in learnt
        assert all(name.startswith("learning rate") for name in learnt if name != change)


# ---------------------------------------------------------------- bounds


def test_an_examination_ends_in_time_and_says_what_was_left_out(tmp_path, data):
    tape = taped(tmp_path / "run", net(), F.cross_entropy, *data)
    ticks = iter(range(10_000))
    found = examine(tape, seconds=3, clock=lambda: float(next(ticks)))
    assert any(result.skipped == "no time was left" for result in found.results)


def test_an_unknown_experiment_is_an_error_that_lists_them(tmp_path, data):
    tape = taped(tmp_path / "run", net(), F.cross_entropy, *data)
    with pytest.raises(OptionError, match="learnability"):
        examine(tape, only=["nonsense"])


# ---------------------------------------------------------------- steps with several models


def test_a_step_in_which_one_optimizer_steps_before_the_others_loss_is_repeated(tmp_path):
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    first, second = torch.optim.Adam(critic.parameters(), 0.01), torch.optim.Adam(generator.parameters(), 0.01)
    models = nn.ModuleDict({"generator": generator, "critic": critic})
    with sonde.watch(models, [first, second], run=tmp_path / "run", budget=None):
        for _ in range(4):
            made, real = generator(torch.randn(16, 2)), torch.randn(16, 2) + 1
            first.zero_grad()
            (F.softplus(-critic(real)).mean() + F.softplus(critic(made.detach())).mean()).backward()
            first.step()
            second.zero_grad()
            F.softplus(-critic(made)).mean().backward()
            second.step()
    assert not examine(tapes.read(tapes.find(tmp_path / "run")), only=["dependence"]).note


def test_a_teacher_that_is_not_watched_is_no_part_of_the_update(tmp_path, data):
    teacher = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, CLASSES))

    def loss_fn(output, target):
        return F.mse_loss(output, teacher(target))

    found = measure(tmp_path, "descent", net(CLASSES), loss_fn, data[0], data[0])
    assert found.number("loss.1") < found.number("start")
