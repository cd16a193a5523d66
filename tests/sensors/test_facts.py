"""Facts: what objects say about themselves when a session attaches, and what turns out in the first passes."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.sensors.watching import Watching
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from sonde.core.facts import CallFacts, Facts
from sonde.sensors import initialization
from sonde.testing import tiny_mlp


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def facts_of(tmp_path, model, optimizer=None, **options):
    with Watching(tmp_path, model, optimizer, **options) as seen:
        seen.session.flush()
    return seen.facts


def test_values_of_parameters_before_training(tmp_path):
    model = nn.ModuleDict({name: nn.Linear(3, 4) for name in ("a", "twin", "rows", "zero", "ones")})
    with torch.no_grad():
        model["twin"].weight.copy_(model["a"].weight)
        model["rows"].weight.copy_(torch.randn(1, 3).expand(4, 3))
        model["zero"].weight.zero_()
        model["ones"].weight.fill_(1)
    facts = {each.name: each for each in facts_of(tmp_path, model).parameters}
    assert facts["a.weight"].equal_to == ("twin.weight",)
    assert facts["twin.weight"].equal_to == ("a.weight",)
    assert [name for name, each in facts.items() if each.equal_rows] == ["rows.weight", "zero.weight", "ones.weight"]
    assert [name for name, each in facts.items() if each.constant] == ["zero.weight", "ones.weight"]
    assert [name for name, each in facts.items() if each.zero] == ["zero.weight"]
    assert not facts["zero.weight"].equal_to
    assert (facts["a.weight"].shape, facts["a.weight"].dtype, facts["a.weight"].kind) == ((4, 3), "float32", "Linear")


def test_beyond_the_budget_values_are_not_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(initialization, "BUDGET_BYTES", 100)
    monkeypatch.setattr(initialization, "ALWAYS_BYTES", 20)
    model = nn.Linear(100, 4)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    facts = {each.name: each for each in facts_of(tmp_path, model).parameters}
    assert not facts["weight"].zero
    assert facts["bias"].zero


def test_optimizers_say_whose_parameters_they_hold(tmp_path):
    model = tiny_mlp()
    model[2].requires_grad_(False)
    stranger = nn.Parameter(torch.ones(2, 3))
    groups = [{"params": [model[0].weight, stranger]}, {"params": [model[0].bias], "lr": 0.5, "betas": (0.8, 0.9)}]
    optimizer = torch.optim.Adam(groups, lr=0.1, weight_decay=0.01)
    optimizer.param_groups[1]["params"].append(model[0].weight)
    facts = facts_of(tmp_path, model, optimizer)
    (held,) = facts.optimizers
    assert (held.name, held.kind) == ("optimizer", "Adam")
    assert [group.parameters for group in held.groups] == [("0.weight",), ("0.bias", "0.weight")]
    assert held.groups[1].settings["lr"] == 0.5
    assert (held.groups[1].settings["betas0"], held.groups[1].settings["eps"]) == (0.8, 1e-8)
    assert held.foreign == ("(2, 3)",)
    assert held.duplicates == ("0.weight",)
    owners = {each.name: (each.owners, each.trainable) for each in facts.parameters}
    assert owners == {
        "0.weight": (("optimizer",), True),
        "0.bias": (("optimizer",), True),
        "2.weight": ((), False),
        "2.bias": ((), False),
    }


def test_modules_have_their_plain_settings(tmp_path):
    model = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2), nn.Dropout(0.7).eval(), nn.Softmax(1))
    facts = {each.name: each for each in facts_of(tmp_path, model).modules}
    assert facts["0"].settings["bias"] is False
    assert facts["0"].settings["kernel_size0"] == 3
    assert facts["1"].settings["momentum"] == 0.1
    assert (facts["2"].settings["p"], facts["2"].training) == (0.7, False)
    assert (facts["3"].kind, facts["3"].settings["dim"]) == ("Softmax", 1)
    assert facts["(model)"].kind == "Sequential"


class Augmented(Dataset):
    def __init__(self):
        self.noise = np.random.default_rng(0)

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.zeros(1)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda: DataLoader(TensorDataset(torch.zeros(10)), batch_size=4, shuffle=True),
            {"batch_size": 4, "shuffle": True, "length": 3, "dataset_length": 10, "generator_in_dataset": False},
        ),
        (
            lambda: DataLoader(Augmented(), batch_size=5, drop_last=True, num_workers=2),
            {"shuffle": False, "drop_last": True, "num_workers": 2, "generator_in_dataset": True, "iterable": False},
        ),
        (lambda: DataLoader(Stream()), {"iterable": True, "dataset_kind": "Stream"}),
        (lambda: [torch.zeros(1)] * 7, {"length": 7}),
        (lambda: iter(()), {}),
    ],
)
def test_loaders_say_how_they_load(tmp_path, make, expected):
    model, loader = tiny_mlp(), make()
    before = torch.get_rng_state()
    found = facts_of(tmp_path, model, loader=loader).loader
    assert found.kind == type(loader).__name__
    assert expected.items() <= found.settings.items()
    assert ("shuffle" in found.settings) == ("shuffle" in expected), "what it does not say is left out"
    assert torch.equal(before, torch.get_rng_state())


def test_the_scheduler_says_which_optimizer_it_turns(tmp_path):
    model = tiny_mlp()
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    scheduler = torch.optim.lr_scheduler.StepLR(other, 5, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu")
    facts = facts_of(tmp_path, model, optimizer, scheduler=scheduler, scaler=scaler)
    assert facts.scheduler.kind == "StepLR"
    assert facts.scheduler.settings["step_size"] == 5
    assert facts.scheduler.settings["optimizer"] == "", "it is none of those that are watched"
    assert facts.scaler is True


def test_weights_that_should_be_tied_are_named(tmp_path):
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = types.SimpleNamespace(tie_word_embeddings=True)
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)

        def get_input_embeddings(self):
            return self.embed

        def get_output_embeddings(self):
            return self.head

    model = Language()
    assert facts_of(tmp_path, model).tied == (("embed.weight", "head.weight"),)
    model.head.weight = model.embed.weight
    (tmp_path / "tied").mkdir()
    facts = facts_of(tmp_path / "tied", model)
    assert facts.tied == ()
    assert facts.parameters[0].aliases == ("head.weight",)


@pytest.mark.parametrize("autocast", [True, False])
def test_order_edges_and_autocast_come_from_the_first_training_passes(tmp_path, autocast):
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first, self.side = nn.Linear(4, 2), nn.Linear(4, 4), nn.Tanh()
            self.act = nn.ReLU(inplace=True)

        def forward(self, x):
            hidden = self.act(self.first(x))
            return self.last(hidden + self.side(hidden))

    model = Branching()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watching(tmp_path, model, optimizer) as seen:
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = F.mse_loss(model(torch.randn(3, 4)), torch.zeros(3, 2))
            loss.backward()
            optimizer.step()
    facts = seen.facts
    assert facts.order == ("first", "act", "side", "last")
    assert facts.edges == (("first", "act"), ("act", "side")), "a sum is no module's output"
    assert facts.autocast == ("bfloat16" if autocast else "")
    statements = [event.step for event in seen.sink.events if event.event_type == "facts"]
    assert statements[0] == 0
    assert len(statements) <= 3, "stated again only when something is new"


def test_settings_in_types_of_numpy_are_read_while_the_run_is_recorded():

    stated = {"optimizers": [{"name": "", "kind": "SGD", "groups": [{"settings": {"lr": np.float64(0.5)}}]}]}
    assert Facts.from_json(stated).optimizers[0].groups[0].settings == {"lr": 0.5}


def test_a_field_that_does_not_fit_costs_no_other():

    facts = Facts.from_json({"scaler": True, "autocast": 3, "order": ["a", "b"], "parameters": [{"name": 5}], "new": 1})
    assert (facts.scaler, facts.autocast, facts.order, facts.parameters) == (True, "", ("a", "b"), ())
    assert Facts.from_json("nonsense") == Facts()


def test_settings_of_any_type_are_stated():
    class Name(str):
        __slots__ = ()

    given = {"scheme": Name("cosine"), "warm": np.float64(0.5), "cycles": np.int64(3), "on": np.bool_(True)}
    plain = Facts(program=(CallFacts(verb="made", data=given),)).to_json()
    stated = Facts.from_json(plain).program[0].data
    assert stated == {"scheme": "cosine", "warm": 0.5, "cycles": 3, "on": True}
    assert [type(each) for each in stated.values()] == [str, float, int, bool]
