"""The budget: what recording may cost, and what is thinned to keep it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sonde
from sonde.record.governor import EVERYTHING, FULL_STEPS, LEVELS, NOTHING, OUTPUTS, PARAMETERS, Governor, Strides


@pytest.fixture(autouse=True)
def nothing_is_free(monkeypatch):
    """Let the budget hold from the first decision on, however short steps are."""
    monkeypatch.setattr("sonde.record.governor.FREE_S", 0.0)


class Machine:
    """A training of which steps of each level take a known time, and a governor that only sees its clocks."""

    def __init__(self, budget, *, bare, cost, hidden=(0, 0, 0, 0), explores=False):
        self.now = self.own = 0.0
        self.bare, self.cost, self.hidden = bare, cost, hidden
        self.decisions = []
        self.levels = []
        self.governor = Governor(
            budget,
            lambda: self.own,
            lambda level: None,
            self.decisions.append,
            explores=lambda: explores,
            clock=lambda: self.now,
        )

    def run(self, steps, due=lambda step: True):
        for step in range(steps):
            level = self.governor.level if due(step) else NOTHING
            self.levels.append(level)
            self.now += self.bare + self.cost[level] + self.hidden[level]
            self.own += self.cost[level]
            self.governor.end_step(due=due(step))
        return self

    def share(self, since):
        """Return what recording really added since a step."""
        levels = self.levels[since:]
        return sum(self.cost[level] + self.hidden[level] for level in levels) / (len(levels) * self.bare)


def test_an_expensive_step_is_recorded_in_full_every_time():
    machine = Machine(0.05, bare=1.0, cost=(0, 0.005, 0.01, 0.02)).run(500)
    assert set(machine.levels) == {EVERYTHING}
    assert not machine.decisions


def test_without_a_budget_everything_is_recorded_whatever_it_costs():
    machine = Machine(None, bare=0.001, cost=(0, 1, 2, 3)).run(200)
    assert set(machine.levels) == {EVERYTHING}


def test_short_steps_are_recorded_in_full_until_that_has_taken_a_second(monkeypatch):
    monkeypatch.setattr("sonde.record.governor.FREE_S", 1.0)
    machine = Machine(0.05, bare=0.001, cost=(0, 1e-3, 2e-3, 5e-3)).run(1000)
    assert set(machine.levels[:190]) == {EVERYTHING}
    assert machine.levels[300:].count(EVERYTHING) < 50


def test_the_first_steps_are_recorded_in_full():
    machine = Machine(0.05, bare=0.001, cost=(0, 0.01, 0.02, 0.03)).run(100)
    assert set(machine.levels[:FULL_STEPS]) == {EVERYTHING}


@pytest.mark.parametrize("scale", [0.5, 1, 3, 20])
def test_the_cost_stays_within_the_budget(scale):
    cost = tuple(scale * each * 1e-4 for each in (0, 2, 5, 12))
    machine = Machine(0.05, bare=0.01, cost=cost).run(4000)
    assert machine.share(since=200) <= 0.05 * 1.02
    assert PARAMETERS in machine.levels[200:] or EVERYTHING in machine.levels[200:]


def test_the_diagnosis_is_thinned_before_outputs_and_outputs_before_parameters():
    extras = Machine(0.05, bare=0.01, cost=(0, 1e-4, 2e-4, 15e-4)).run(400).governor.strides
    assert (extras.parameters, extras.outputs) == (1, 1)
    assert extras.extras > 1
    outputs = Machine(0.05, bare=0.01, cost=(0, 2e-4, 15e-4, 20e-4)).run(400).governor.strides
    assert outputs.parameters == 1
    assert outputs.extras >= outputs.outputs > 1


def test_nothing_ever_stops():
    machine = Machine(0.05, bare=1e-5, cost=(0, 1e-3, 2e-3, 4e-3)).run(40_000)
    assert EVERYTHING in machine.levels[10_000:]
    assert machine.share(since=1000) < 0.5  # the longest stride is bounded, so such a tiny step may exceed its budget


def test_time_that_no_clock_of_ours_sees_counts_where_steps_are_compared():
    machine = Machine(0.05, bare=0.01, cost=(0, 1e-5, 1e-5, 1e-5), hidden=(0, 0, 2e-3, 2e-3), explores=True).run(2000)
    assert machine.governor.strides.outputs > 1
    assert machine.share(since=200) <= 0.05 * 1.02


def test_a_training_that_becomes_slower_is_recorded_more_often_again():
    machine = Machine(0.05, bare=0.001, cost=(0, 1e-4, 2e-4, 5e-4)).run(1000)
    thin = machine.governor.strides
    machine.bare = 0.1
    machine.run(2000)
    assert machine.governor.strides.extras < thin.extras


def test_steps_that_the_user_leaves_out_are_not_recorded_for_the_governor_either():
    machine = Machine(0.05, bare=0.01, cost=(0, 1e-3, 2e-3, 3e-3)).run(1000, due=lambda step: step % 10 == 0)
    assert all(level == NOTHING for step, level in enumerate(machine.levels) if step % 10)
    # One step in ten costs 3 % of all on average, so each is recorded in full.
    assert {machine.levels[step] for step in range(300, 1000, 10)} == {EVERYTHING}


@given(st.integers(0, 60))
def test_strides_divide_each_other_and_shares_add_up(count):
    strides = Strides()
    for _ in range(count):
        strides = strides.thinner()
    assert strides.outputs % strides.parameters == 0
    assert strides.extras % strides.outputs == 0
    assert sum(strides.shares()) == pytest.approx(1)
    if strides.extras <= 2048:
        seen = [strides.level(step) for step in range(strides.extras)]
        assert [seen.count(level) / len(seen) for level in LEVELS] == pytest.approx(strides.shares())


def train(path, steps, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters())
    with sonde.watch(model, optimizer, run=path, **options) as session:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return session, model


def test_a_tiny_model_is_thinned_and_the_run_names_it(tmp_path):
    session, _ = train(tmp_path / "run", 400, budget=0.01)
    run = sonde.open_run(tmp_path / "run")
    assert len(run.series("0.weight:gradient", "norm").steps) < 300
    assert list(run.series("0.weight:gradient", "norm").steps[:FULL_STEPS]) == list(range(1, FULL_STEPS + 1))
    assert len(run.series("loss", "mean").steps) == 400  # what is logged is recorded in every step
    named = [event for event in run.events if event.event_type == "budget"]
    assert named
    assert named[-1].data["outputs_every"] > 1
    (cost,) = [event for event in run.events if event.event_type == "cost"]
    assert cost.data["budget"] == 0.01
    assert session.cost is not None


def test_the_budget_does_not_change_the_training(tmp_path):
    _, thinned = train(tmp_path / "thinned", 120, budget=0.001)
    _, full = train(tmp_path / "full", 120, budget=None)
    for ours, theirs in zip(thinned.parameters(), full.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("wrong", [0, -0.1, "5%", True, float("nan"), float("inf")])
def test_a_budget_that_means_nothing_is_refused(tmp_path, wrong):
    with pytest.raises(sonde.OptionError, match="budget"):
        sonde.watch(nn.Linear(2, 2), run=tmp_path / "run", budget=wrong)


def test_the_environment_sets_the_default(tmp_path, monkeypatch):
    for text, expected in (("none", None), ("0.2", 0.2), ("", 0.05)):
        monkeypatch.setenv("SONDE_BUDGET", text)
        assert sonde.Options().recording.budget == expected
    monkeypatch.setenv("SONDE_BUDGET", "a lot")
    with pytest.raises(sonde.OptionError, match="SONDE_BUDGET"):
        sonde.Options()


def test_levels_are_in_the_order_of_what_they_record():
    assert NOTHING < PARAMETERS < OUTPUTS < EVERYTHING


def test_the_state_before_the_first_step_is_not_taken_for_the_cost_of_an_unrecorded_step(tmp_path):
    session, _ = train(tmp_path / "run", 60, budget=0.05)
    worker = session._pipeline.worker
    assert worker.seconds(-1) > 0
    assert (worker.seconds(NOTHING) or 0) < worker.seconds(-1)


def test_unrecorded_steps_that_cost_more_than_the_budget_do_not_end_the_recording():
    machine = Machine(0.05, bare=0.001, cost=(1e-4, 2e-4, 3e-4, 5e-4)).run(2000)
    assert machine.governor.strides.parameters <= 16


def test_levels_are_compared_anew_when_recording_has_become_cheaper():
    machine = Machine(0.05, bare=0.001, cost=(0, 1e-2, 2e-2, 5e-2)).run(700)
    assert machine.governor.strides.parameters > 16
    machine.cost = (0, 5e-6, 1e-5, 2e-5)
    machine.run(300_000)
    assert machine.governor.strides.parameters == 1


@pytest.mark.parametrize("period", [2, 3, 4, 5, 6, 8, 16])
@pytest.mark.parametrize("count", [1, 2, 4, 6, 8, 12])
def test_no_rhythm_of_a_loop_hides_from_a_level(period, count):
    strides = Strides()
    for _ in range(count):
        strides = strides.thinner()
    for level in (PARAMETERS, OUTPUTS, EVERYTHING):
        seen = {step % period for step in range(200 * period * strides.extras) if strides.level(step) >= level}
        assert seen == set(range(period))


def test_every_optimizer_is_recorded_whatever_the_rhythm(tmp_path, monkeypatch):
    monkeypatch.setattr(Governor, "_review", lambda self: setattr(self, "strides", Strides(4, 4, 4)))
    torch.manual_seed(0)
    models = {name: nn.Linear(4, 4) for name in ("generator", "critic")}
    optimizers = {name: torch.optim.SGD(model.parameters(), 1e-3) for name, model in models.items()}
    with sonde.watch(models, run=tmp_path / "run", budget=0.02):  # the optimizers are found when they step
        for step in range(400):
            name = "generator" if step % 4 == 3 else "critic"
            optimizers[name].zero_grad()
            models[name](torch.randn(8, 4)).square().mean().backward()
            optimizers[name].step()
    run = sonde.open_run(tmp_path / "run")
    for name in models:
        assert any(step > 100 for step in run.series(f"{name}.weight:gradient", "norm").steps)


def test_evaluations_are_seen_even_where_steps_are_hardly_ever_recorded(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters())
    with sonde.watch(model, optimizer, run=tmp_path / "run", budget=0.0005):
        for step in range(1, 301):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            if step % 100 == 0:
                with torch.no_grad():
                    model(torch.randn(4, 8))
    run = sonde.open_run(tmp_path / "run")
    sites = [site for site in run.sites if site.phase == "eval" and site.quantity == "output"]
    assert {site.name for site in sites} >= {"0", "1", "2"}


def test_a_loss_that_is_not_finite_is_found_though_its_step_was_to_be_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(Governor, "_review", lambda self: setattr(self, "strides", Strides(1024, 1024, 1024)))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters())
    with sonde.watch(model, optimizer, run=tmp_path / "run", budget=0.01) as session:
        for step in range(1, 201):
            batch = torch.randn(4, 8)
            if step == 150:
                batch[0, 0] = torch.nan
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    (finding,) = [finding for finding in session.findings if finding.severity == "critical"]
    assert finding.step == 150


def test_a_guard_holds_back_a_step_that_is_not_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(Governor, "_review", lambda self: setattr(self, "strides", Strides(1024, 1024, 1024)))
    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with sonde.watch(model, optimizer, run=tmp_path / "run", budget=0.01, guard="skip"):
        for step in range(1, 101):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            if step == 60:
                model.weight.grad.fill_(torch.inf)
            optimizer.step()
    assert torch.isfinite(model.weight).all()
