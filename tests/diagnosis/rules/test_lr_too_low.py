from __future__ import annotations

import handmade
import pytest
import torch
from programs import data, kinds, perceptron, train


@pytest.mark.parametrize(("lr", "ill"), [(1e-7, True), (3e-3, False)])
def test_a_rate_that_moves_nothing_is_found(tmp_path, lr, ill):
    model = perceptron()
    found = train(tmp_path, model, torch.optim.Adam(model.parameters(), lr=lr), *data())
    assert (kinds(found, notes=False)[:1] == ["lr_too_low"]) is ill


@pytest.mark.parametrize(("lr", "ill"), [(1e-7, True), (3e-3, False)])
def test_it_is_found_in_an_adapter_whose_second_factor_starts_at_zero_beside_a_frozen_model(tmp_path, lr, ill):
    class Adapted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.base = torch.nn.Linear(8, 3).requires_grad_(False)
            self.down, self.up = torch.nn.Linear(8, 4), torch.nn.Linear(4, 3)
            torch.nn.init.zeros_(self.up.weight)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    torch.manual_seed(0)
    model = Adapted()
    own = [*model.down.parameters(), *model.up.parameters()]
    found = train(tmp_path, model, torch.optim.Adam(own, lr=lr), *data())
    assert (kinds(found, notes=False)[:1] == ["lr_too_low"]) is ill


@pytest.mark.parametrize(("lr", "ill"), [(1e-7, True), (1e-3, False)])
def test_a_loss_of_both_signs_that_says_nothing_leaves_the_weights_that_have_not_moved(tmp_path, lr, ill):
    model = perceptron()

    def reinforce(output, target):
        actions = torch.distributions.Categorical(logits=output).sample()
        return -(torch.randn(len(output)) * output.log_softmax(1).gather(1, actions[:, None])[:, 0]).mean()

    found = train(tmp_path, model, torch.optim.Adam(model.parameters(), lr=lr), *data(), loss_fn=reinforce)
    assert ("lr_too_low" in kinds(found, notes=False)) is ill


@pytest.mark.parametrize(("lr", "ill"), [(1e-7, True), (3e-2, False)])
def test_a_rate_that_was_too_low_before_a_schedule_lowered_it_is_found(tmp_path, lr, ill):
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    x, _ = data()
    y = torch.randint(3, (len(x),))  # nothing to learn
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 15, gamma=0.1)
    found = train(tmp_path, model, optimizer, x, y, after_step=schedule.step)
    assert ("lr_too_low" in kinds(found, notes=False)) is ill


@pytest.mark.parametrize(("lr", "ill"), [(1e-6, True), (5e-2, False)])
def test_a_rate_that_was_too_low_all_over_one_cycle_is_found(tmp_path, lr, ill):
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    x, _ = data()
    y = torch.randint(3, (len(x),))  # nothing to learn
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=61)
    found = train(tmp_path, model, optimizer, x, y, after_step=schedule.step)
    assert ("lr_too_low" in kinds(found, notes=False)) is ill


@pytest.mark.parametrize(("rate", "ill"), [(1e-8, True), (1e-3, False)])
def test_the_one_of_two_players_that_stands_still_is_named(rate, ill):
    names, steps = ("g.weight", "d.weight"), 60
    readings = {
        "loss:scalar": [0.7] * steps,
        "(loop):vital.turns": [2.0] * steps,
        **{f"{name}:parameter": [[1.0, -1.0]] * steps for name in names},
        **{f"{name}:gradient": [[0.1, -0.1]] * steps for name in names},
        "g.weight:update": [[rate, -rate]] * steps,
        "d.weight:update": [[1e-3, -1e-3]] * steps,
    }
    shapes = {key: {"shape": (2, 1)} for key in readings if "weight" in key}
    players = tuple(
        handmade.optimizer(name, kind="Adam", name=f"optimizer{at}") for name, at in zip(names, ("", "2"), strict=True)
    )
    facts = handmade.model(*names, optimizers=players)
    answer = handmade.ask("lr_too_low", handmade.patient(readings, facts, about=shapes, final=True))
    assert (None if answer is None else answer.sites) == (("optimizer",) if ill else None)


def test_a_warm_up_is_not_too_low(tmp_path):
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1e-5 * 1.1**step)
    assert "lr_too_low" not in kinds(train(tmp_path, model, optimizer, *data(), after_step=schedule.step))


@pytest.mark.parametrize(
    ("pace", "end", "noise", "ill"),
    [
        (5e-4, 0.85, 0.0, True),
        (5e-4, 0.1, 0.0, False),  # it has learnt with little movement, as a model that starts out trained
        (2e-2, 0.85, 0.0, False),
        (5e-4, 1.0, 0.01, True),
        (2e-3, 1.0, 0.01, False),
    ],
)
def test_a_run_whose_steps_add_up_to_little_is_too_slow_if_its_loss_was_still_to_be_lowered(pace, end, noise, ill):
    steps, names = 150, ("a.weight", "b.weight")
    readings = {
        "loss:scalar": [2 + 2 * (end - 1) * at / steps + noise * (-1) ** at for at in range(steps)],
        **{f"{name}:parameter": [[1.0, -1.0]] * steps for name in names},
        **{f"{name}:gradient": [[0.1, -0.1]] * steps for name in names},
        **{f"{name}:update": [[pace, -pace]] * steps for name in names},
    }
    shapes = {key: {"shape": (2, 1)} for key in readings if "weight" in key}
    facts = handmade.model(*names, optimizers=(handmade.optimizer(*names),))
    answer = handmade.ask("lr_too_low", handmade.patient(readings, facts, about=shapes, final=True))
    assert (answer is not None) is ill


def test_a_loss_that_fell_early_and_stays_is_not_called_slow():
    steps = 150
    readings = {
        "loss:scalar": [2 - min(0.4, 0.02 * at) + 0.001 * (-1) ** at for at in range(steps)],
        "a.weight:parameter": [[1.0, -1.0]] * steps,
        "a.weight:gradient": [[0.1, -0.1]] * steps,
        "a.weight:update": [[5e-4, -5e-4]] * steps,
    }
    shapes = {key: {"shape": (2, 1)} for key in readings if "weight" in key}
    facts = handmade.model("a.weight", optimizers=(handmade.optimizer("a.weight"),))
    assert handmade.ask("lr_too_low", handmade.patient(readings, facts, about=shapes, final=True)) is None


def test_a_run_without_gradients_has_no_rate_to_blame():
    steps = 150
    readings = {
        "loss:scalar": [2 + 0.01 * (-1) ** at for at in range(steps)],
        "a.weight:parameter": [[1.0, -1.0]] * steps,
        "a.weight:update": [[0.0, 0.0]] * steps,
        "a.weight:gradient": [[0.0, 0.0]] * steps,
    }
    shapes = {key: {"shape": (2, 1)} for key in readings if "weight" in key}
    facts = handmade.model("a.weight", optimizers=(handmade.optimizer("a.weight"),))
    assert handmade.ask("lr_too_low", handmade.patient(readings, facts, about=shapes, final=True)) is None


@pytest.mark.parametrize(("lr", "words", "ill"), [(1e-6, 20, True), (1e-2, 20, False)])
def test_a_model_of_one_small_table_is_judged_by_its_rows(tmp_path, lr, words, ill):
    torch.manual_seed(0)
    model = torch.nn.Embedding(words, words)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    tokens = torch.randint(words, (100, 256))
    found = train(tmp_path, model, optimizer, tokens.flatten(), (tokens.flatten() + 1) % words)
    assert ("lr_too_low" in kinds(found, notes=False)) is ill
