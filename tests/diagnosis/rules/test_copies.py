"""Copies of weights beside a model: each fault, and healthy programs that look alike."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from programs import classify, data, perceptron
from torch import nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import sonde
from sonde.sensors.copies import Copies, Copy, tensor_sets

X, Y = data(samples=96)


def watched(folder, model, optimizer, **options):
    return sonde.watch(model, optimizer, run=folder / "run", on_error="raise", tape=False, **options)


def train(folder, model, follow, *, steps=130, optimizer=None, watch=None):
    """Train a model and let `follow(step)` update what is beside it after each step; return findings by kind."""
    optimizer = optimizer or SGD(model.parameters(), lr=0.2)
    with watched(folder, watch or model, optimizer) as session:
        for number in range(steps):
            at = torch.arange(16) + number % 5 * 16
            loss = classify(model(X[at]), Y[at])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            follow(number)
    return {each.kind: each for each in session.findings if each.severity != "info"}


@torch.no_grad()
def mix(copies, weights, share):
    for slow, fast in zip(copies, weights, strict=True):
        slow.mul_(share).add_(fast, alpha=1 - share)


class Average:
    """A moving average of weights, kept as a module, as a dictionary or as a list."""

    def __init__(self, model, form):
        self.model = model
        self.shadow = copy.deepcopy(model).requires_grad_(False)
        if form == "dict":
            self.shadow = {name: each.detach().clone() for name, each in model.named_parameters()}
        elif form == "list":
            self.shadow = [each.detach().clone() for each in model.parameters()]

    def update(self, share):
        weights = dict(self.model.named_parameters())
        if isinstance(self.shadow, dict):
            for name, each in weights.items():
                self.shadow[name] = share * self.shadow[name] + (1 - share) * each.detach()
        else:
            mix(self.shadow if isinstance(self.shadow, list) else self.shadow.parameters(), weights.values(), share)


SHARES = {
    "constant": lambda step: 0.99,
    "short": lambda step: 0.8,
    "rising": lambda step: min(0.999, (1 + step) / (10 + step)),
    "copied at first": lambda step: 0.0 if step < 40 else 0.95,
    "now and then": lambda step: 1.0 if step % 10 else 0.0,
}


def average(folder, share, form):
    model = perceptron()
    ema = Average(model, form)

    def follow(step):
        if share(step) < 1 or form == "module":
            ema.update(share(step))

    return train(folder, model, follow)


@pytest.mark.parametrize("form", ["module", "dict", "list"])
def test_an_average_that_keeps_nothing_of_itself(tmp_path, form):
    finding = average(tmp_path, lambda step: 0.01, form)["ema_not_updated"]
    assert finding.sites[0] == "ema.shadow"
    assert "keeps 0.01 of itself" in finding.cause


@pytest.mark.parametrize(
    ("share", "form"), [("constant", "dict"), ("constant", "list"), *((each, "module") for each in SHARES)]
)
def test_an_average_that_is_one(tmp_path, share, form):
    assert "ema_not_updated" not in average(tmp_path, SHARES[share], form)


def test_an_average_whose_decay_is_one(tmp_path):
    finding = average(tmp_path, lambda step: 1.0, "module")["ema_not_updated"]
    assert "keeps its values" in finding.cause


@pytest.mark.parametrize("name", ["ema", "actor"])
def test_weights_that_are_copied_after_every_step(tmp_path, name):
    found = (copy_as_average if name == "ema" else copy_as_actor)(tmp_path)
    assert ("ema_not_updated" in found) is (name == "ema")


def copy_as_average(folder):
    model = perceptron()
    ema = copy.deepcopy(model)
    return train(folder, model, lambda step: ema.load_state_dict(model.state_dict()))


def keep_views(folder):
    model = perceptron()
    ema_views = model.state_dict()
    return train(folder, model, lambda step: len(ema_views))


def test_views_of_the_weights_are_no_copies(tmp_path):
    assert "ema_not_updated" not in keep_views(tmp_path)


def mask_weights(folder):
    model = perceptron()
    masks = {}

    def follow(step):
        masks.update({name: torch.ones_like(each) for name, each in model.named_parameters()})

    return train(folder, model, follow, steps=12)


def add_momentum(folder):
    model = perceptron()
    momentum = [torch.zeros_like(each) for each in model.parameters()]

    @torch.no_grad()
    def follow(step):
        for slow, each in zip(momentum, model.parameters(), strict=True):
            slow.mul_(0.5).add_(each.grad)

    return train(folder, model, follow)


@pytest.mark.parametrize("program", [mask_weights, add_momentum])
def test_tensors_of_the_same_shapes_need_not_follow(tmp_path, program):
    assert "ema_not_updated" not in program(tmp_path)


def copy_as_actor(folder):
    model = perceptron()
    actor = copy.deepcopy(model)
    return train(folder, model, lambda step: actor.load_state_dict(model.state_dict()))


def load_target(folder, source):
    model = perceptron()
    target_net = copy.deepcopy(model)

    def follow(step):
        if source != "never" and step % 5 == 4:
            target_net.load_state_dict((target_net if source == "itself" else model).state_dict())

    return train(folder, model, follow, steps=32)


@pytest.mark.parametrize("source", ["itself", "model", "never"])
def test_a_target_that_loads_itself(tmp_path, source):
    found = load_target(tmp_path, source)
    assert ("ema_not_updated" in found) is (source == "itself")
    assert source != "itself" or found["ema_not_updated"].sites[0] == "target_net"


def forget_target(folder, every):
    model = perceptron()
    target_net = copy.deepcopy(model)

    def follow(step):
        if step % every == every - 1:
            target_net.load_state_dict(model.state_dict())

    return train(folder, model, follow, steps=260)


def keep_teacher(folder):
    model = perceptron()
    teacher = copy.deepcopy(model)
    return train(folder, model, lambda step: teacher(X[:2]), steps=260)


def random_target(folder):
    model, target = perceptron(), perceptron()
    for each in target.parameters():
        nn.init.normal_(each, std=0.3)
    return train(folder, model, lambda step: target(X[:2]), steps=260)


@pytest.mark.parametrize(
    ("program", "ill"),
    [
        (partial(forget_target, every=10_000), True),
        (partial(forget_target, every=100), False),
        (keep_teacher, False),
        (random_target, False),
    ],
)
def test_a_target_that_nothing_updates(tmp_path, program, ill):
    assert ("ema_not_updated" in program(tmp_path)) is ill


class Critics(nn.Module):
    """Two critics, and a target network for each."""

    def __init__(self):
        super().__init__()
        self.q1, self.q2 = perceptron(), perceptron()
        for each in self.q2.parameters():
            nn.init.normal_(each, std=0.2)
        self.target1, self.target2 = copy.deepcopy(self.q1), copy.deepcopy(self.q2)

    def forward(self, x):
        return self.q1(x) + self.q2(x)


def follow_critics(folder, second):
    model = Critics()
    learnt = [*model.q1.parameters(), *model.q2.parameters()]

    def follow(step):
        mix(model.target1.parameters(), model.q1.parameters(), 0.9)
        mix(model.target2.parameters(), getattr(model, second).parameters(), 0.9)

    return train(folder, model, follow, steps=10, optimizer=SGD(learnt, lr=0.05))


@pytest.mark.parametrize("second", ["q1", "q2"])
def test_a_target_that_follows_the_other_critic(tmp_path, second):
    found = follow_critics(tmp_path, second)
    assert ("ema_not_updated" in found) is (second == "q1")
    assert second != "q1" or "q2, but takes the weights of model.q1" in found["ema_not_updated"].cause


class Agent(nn.Module):
    """A network and its target, whose difference is minimised."""

    def __init__(self):
        super().__init__()
        self.net = perceptron()
        self.target = copy.deepcopy(self.net)
        self.cuts = True

    def forward(self, x):
        with torch.set_grad_enabled(not self.cuts):
            other = self.target(x.flip(0))
        return self.net(x) - 0.5 * other


def train_agent(folder, cuts):
    agent = Agent()
    agent.cuts = cuts

    def follow(step):
        if cuts:
            mix(agent.target.parameters(), agent.net.parameters(), 0.95)

    return train(folder, agent, follow, steps=12)


@pytest.mark.parametrize("cuts", [True, False])
def test_a_target_that_the_optimizer_trains(tmp_path, cuts):
    found = train_agent(tmp_path, cuts)
    assert ("ema_not_updated" in found) is not cuts
    assert cuts or "learns by itself" in found["ema_not_updated"].cause


@pytest.mark.parametrize("decay", [0.99, None])
def test_torchs_own_averages(tmp_path, decay):
    model = perceptron()
    averaged = AveragedModel(model, multi_avg_fn=None if decay is None else get_ema_multi_avg_fn(decay))
    assert "ema_not_updated" not in train(tmp_path, model, lambda step: averaged.update_parameters(model))


@pytest.mark.parametrize("mode", ["evaluation", "training"])
@pytest.mark.parametrize("what", ["parameters", "state"])
def test_an_average_without_the_statistics_of_batch_norms(tmp_path, what, mode):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    ema = copy.deepcopy(model).requires_grad_(False)
    ema.train() if mode == "training" else ema.eval()  # a method of this name is not Python's function

    @torch.no_grad()
    def follow(step):
        own, fast = ema.state_dict(), dict(model.named_parameters()) if what == "parameters" else model.state_dict()
        for name, each in fast.items():
            if each.is_floating_point():
                own[name].mul_(0.9).add_(each, alpha=0.1)

    is_ill = (what, mode) == ("parameters", "evaluation")
    assert ("batchnorm_stats_stale" in train(tmp_path, model, follow)) is is_ill


def test_copies_on_a_device_are_compared_at_the_end(monkeypatch):
    model = perceptron()
    ema = copy.deepcopy(model)
    owners = {id(each): ("optimizer", 0) for each in model.parameters()}
    found = Copies()
    monkeypatch.setattr(Copy, "read", lambda self: None)  # as if the values were on a device
    for step in range(4):
        found.look(step, [{"model": model, "ema": ema}], owners)
        with torch.no_grad():
            for each in model.parameters():
                each.add_(0.1 * torch.ones_like(each))
        mix(ema.parameters(), model.parameters(), 0.9)
    assert found.found["ema"].pairs == 0
    monkeypatch.undo()
    found.read()
    assert (found.found["ema"].pairs, found.found["ema"].of) == (3, "model")
    assert found.found["ema"].shares == pytest.approx([0.9] * 3, abs=1e-4)


def test_a_frozen_teacher(tmp_path):
    model = perceptron()
    teacher = copy.deepcopy(model).requires_grad_(False)
    assert "ema_not_updated" not in train(tmp_path, model, lambda step: teacher(X[:2]), steps=40)


class Player(nn.Sequential):
    def act(self, x):
        return self(x)


def replace_late(folder, steps, replaces):
    """The first looks see a method of the module, which calls it `self`, and the last ones its caller."""
    model = Player(*perceptron())
    target = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = (each[:8] for each in data())
    with sonde.watch(model, optimizer, run=folder / "run", tape=False) as session:
        for number in range(steps):
            optimizer.zero_grad()
            out = model.act(x) if number < 600 else model(x)
            torch.nn.functional.cross_entropy(out, y).backward()
            optimizer.step()
            if number == 700 and replaces:
                target.load_state_dict(model.state_dict())
    return {finding.kind: finding for finding in session.findings}


@pytest.mark.parametrize("steps", [720, 1030])
@pytest.mark.parametrize("replaces", [True, False])
def test_a_target_that_is_replaced_after_hundreds_of_steps(tmp_path, steps, replaces):
    finding = replace_late(tmp_path, steps, replaces).get("ema_not_updated")
    assert (finding is None) is replaces
    assert finding is None or "began as a copy of model" in finding.cause


def test_a_module_has_the_name_that_its_caller_gave_it():
    net = nn.Linear(2, 2)
    assert [each.path for each in tensor_sets([{"self": net}, {"net": net}])] == ["net"]
    assert [each.path for each in tensor_sets([{"self": net}])] == ["self"]


def learn_values(folder, syncs, bootstraps):
    """Learn values of states beside a second network that has no telling name."""
    torch.manual_seed(0)
    values = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    other = copy.deepcopy(values)
    optimizer = SGD(values.parameters(), lr=0.01)
    with sonde.watch(values, optimizer, run=folder / "run", on_error="raise") as session:
        for step in range(300):
            state, reward = torch.randn(16, 4), torch.randn(16)
            with torch.no_grad():
                wanted = reward + 0.9 * other(state + 1).amax(1) if bootstraps else other(state).amax(1)
            loss = nn.functional.mse_loss(values(state)[:, 0], wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if syncs and step % 20 == 0:
                other.load_state_dict(values.state_dict())
    return {each.kind for each in session.findings if each.severity != "info"}


@pytest.mark.parametrize(
    ("syncs", "bootstraps", "ill"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_a_network_that_values_the_next_states_must_follow_whatever_its_name(tmp_path, syncs, bootstraps, ill):
    assert ("ema_not_updated" in learn_values(tmp_path, syncs, bootstraps)) is ill
