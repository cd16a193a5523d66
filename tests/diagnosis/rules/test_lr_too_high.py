from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from handmade import ask, loss, model, patient
from programs import data, kinds, perceptron, train

from sonde.core.facts import ParameterFacts


@pytest.mark.parametrize(("lr", "ill"), [(10.0, True), (3e-3, False)])
def test_a_rate_far_beyond_the_weights_is_found_and_a_usual_one_is_not(tmp_path, lr, ill):
    model = perceptron()
    found = train(tmp_path, model, torch.optim.Adam(model.parameters(), lr=lr), *data())
    assert ("lr_too_high" in kinds(found, notes=False)) is ill
    if ill:
        assert next(finding for finding in found if finding.kind == "lr_too_high").sites[0] == "optimizer"


@pytest.mark.parametrize(("fall", "ill"), [(0.6, False), (0.0, True)])
def test_long_steps_are_not_blamed_for_a_loss_that_fell_by_no_more_than_it_scatters(fall, ill):
    scatter = 0.6 * np.tile([1.0, -1.0, 0.0, 0.0, 0.0], 24)
    losses = 7 - np.where(np.arange(120) < 5, 0, fall) + scatter
    sizes = {"parameter": 1.0, "update": 0.2, "gradient": 1.0}
    sites = {f"{name}.weight:{what}": [np.full((4, 4), size)] * 120 for name in "ab" for what, size in sizes.items()}
    about = {key: {"shape": (4, 4)} for key in sites}
    case = patient(sites | {"loss:scalar": list(losses)}, model("a.weight", "b.weight"), about=about)
    assert (ask("lr_too_high", case) is not None) is ill


@pytest.mark.parametrize(("highest", "update", "ill"), [(40.0, 0.2, True), (2.5, 0.2, False), (40.0, 0.01, False)])
def test_few_long_steps_and_a_jump_of_a_loss_that_stays_where_it_was(highest, update, ill):
    losses = np.where(np.arange(120) == 30, highest, 2.3 + 0.01 * np.tile([1.0, -1.0], 60))
    sizes = {"parameter": 1.0, "update": update, "gradient": 1.0}
    sites = {f"{name}.weight:{what}": [np.full((4, 4), size)] * 2 for name in "ab" for what, size in sizes.items()}
    about = {key: {"shape": (4, 4)} for key in sites}
    case = patient(sites | {"loss:scalar": list(losses)}, model("a.weight", "b.weight"), about=about)
    assert (ask("lr_too_high", case) is not None) is ill


def test_long_steps_of_a_run_that_learns_are_no_finding(tmp_path):
    model = perceptron()
    found = train(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.5), *data())
    assert "lr_too_high" not in kinds(found)


@pytest.mark.parametrize(("lr", "ill"), [(3.0, True), (2e-3, False)])
def test_an_adapter_that_starts_at_zero_is_not_taken_for_long_steps(tmp_path, lr, ill):
    class Adapted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.base = torch.nn.Linear(8, 3).requires_grad_(False)
            self.down = torch.nn.Linear(8, 2, bias=False)
            self.up = torch.nn.Linear(2, 3, bias=False)
            torch.nn.init.zeros_(self.up.weight)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    torch.manual_seed(0)
    model = Adapted()
    inputs, target = torch.randn(4096, 8), torch.randint(3, (4096,))  # nothing to learn: the loss does not fall
    optimizer = torch.optim.Adam([*model.down.parameters(), *model.up.parameters()], lr=lr)
    found = train(tmp_path, model, optimizer, inputs, target)
    assert ("lr_too_high" in kinds(found, notes=False)) is ill


def test_a_run_that_learnt_until_an_odd_batch_broke_it_is_not_blamed_on_long_steps(tmp_path):
    model = perceptron()
    inputs, target = data()
    steps = 0

    def classify_but_for_one_batch(output, labels):
        nonlocal steps
        steps += 1
        odd = output * torch.tensor(0.0).log() * 0 if steps == 25 else 0
        return torch.nn.functional.cross_entropy(output + odd, labels)

    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    found = train(tmp_path, model, optimizer, inputs, target, loss_fn=classify_but_for_one_batch)
    assert "lr_too_high" not in kinds(found)
    assert any(kind.startswith("nan") for kind in kinds(found))


@pytest.mark.parametrize(("lr", "ill"), [(0.5, True), (5e-3, False)])
def test_a_loss_that_jumps_in_the_first_steps_is_found_though_it_falls_again(tmp_path, lr, ill):
    model = perceptron()
    x, y = data()
    target = torch.nn.functional.one_hot(y).float()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.1)
    found = train(
        tmp_path, model, optimizer, x, target, steps=150, loss_fn=torch.nn.functional.mse_loss,
        after_step=scheduler.step if ill else lambda: None,
    )  # fmt: skip
    assert ("lr_too_high" in kinds(found, notes=False)) is ill


@pytest.mark.parametrize(("momentum", "lr", "ill"), [(0.999, 0.05, True), (0.9, 0.05, False), (0.999, 1e-5, False)])
def test_a_momentum_that_forgets_nothing_within_the_run_is_found_where_its_steps_add_up(tmp_path, momentum, lr, ill):
    model = perceptron()
    found = train(tmp_path, model, torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum), *data())
    high = [each for each in found if each.kind == "lr_too_high"]
    assert ["1000 steps" in each.cause for each in high] == [True] * ill


@pytest.mark.parametrize(("ends", "ill"), [(1.11, True), (0.9, False)])
def test_a_loss_that_long_steps_throw_up_and_that_falls_only_to_that_of_guessing_is_found(ends, ill):
    fell = [1.12, *[1.5] * 9, *[ends] * 60]
    readings = {
        "loss:scalar": fell,
        "loss_fn:output": fell,
        "loss_fn:vital.running_label_entropy": [1.1] * 70,
        **{f"{name}.weight:parameter": [[1.0, -1.0]] * 70 for name in "ab"},
        **{f"{name}.weight:update": [[0.5, -0.5]] * 5 + [[0.01, -0.01]] * 65 for name in "ab"},
    }
    shapes = {key: {"shape": (2, 1)} for key in readings if "weight" in key}
    facts = model("a.weight", "b.weight", losses=(loss("cross_entropy", classes=3),))
    answer = ask("lr_too_high", patient(readings, facts, about=shapes))
    assert (answer is not None) is ill


def test_a_loss_that_begins_at_zero_does_not_jump(tmp_path):
    model = perceptron()
    x, _ = data()
    first = []

    def nothing_at_first(output, target):
        first.append(None)
        return output.square().mean() * (len(first) > 1)

    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    found = train(tmp_path, model, optimizer, x, x, loss_fn=nothing_at_first)
    assert "lr_too_high" not in kinds(found, notes=False)


@pytest.mark.parametrize(
    ("first", "grown", "left", "ill"),
    [
        (0.6, 8.0, 0.5, True),
        (0.1, 8.0, 0.5, False),  # as long as first steps of Adam often are
        (0.6, 2.0, 0.5, False),
        (0.6, 8.0, 0.05, False),  # it has learnt all the same
    ],
)
def test_first_steps_as_long_as_the_weights_that_leave_them_many_times_as_large_are_found(first, grown, left, ill):
    steps, names = 80, ("a.weight", "b.weight")
    sizes = [1.0, *np.linspace(1.5, grown, steps - 1)]
    readings = {
        "loss:scalar": [2 * max(left, 1 - at / 20) for at in range(steps)],
        **{f"{name}:parameter": [[size, -size] for size in sizes] for name in names},
        **{f"{name}:gradient": [[0.1, -0.1]] * steps for name in names},
        **{f"{name}:update": [[first, -first]] * 5 + [[0.01, -0.01]] * (steps - 5) for name in names},
    }
    shapes = {key: {"shape": (2, 1)} for key in readings if "weight" in key}
    answer = ask("lr_too_high", patient(readings, model(*names), about=shapes))
    assert (answer is not None) is ill


def test_weights_that_were_drawn_too_small_are_not_taken_for_long_steps():
    steps, shape, names = 80, (4, 400), ("a.weight", "b.weight")
    sizes = [1e-4, *np.linspace(0.002, 0.02, steps - 1)]
    readings = {
        "loss:scalar": [2 * max(0.5, 1 - at / 20) for at in range(steps)],
        **{f"{name}:parameter": [np.full(shape, size) for size in sizes] for name in names},
        **{f"{name}:gradient": [np.full(shape, 0.1)] * steps for name in names},
        **{f"{name}:update": [np.full(shape, 1e-3)] * steps for name in names},
    }
    facts = replace(model(*names), parameters=tuple(ParameterFacts(name=name, shape=shape) for name in names))
    case = patient(readings, facts, about={key: {"shape": shape} for key in readings if "weight" in key})
    assert ask("lr_too_high", case) is None
