"""The budget: what recording may cost, and what is thinned to keep it."""

from __future__ import annotations

import random
import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sonde
from sonde.forensics.tape.recorder import TapeRecorder
from sonde.record.governor import (
    EVERYTHING,
    FULL_STEPS,
    LEVELS,
    NOTHING,
    OUTPUTS,
    PARAMETERS,
    SENSORS_ALWAYS,
    Governor,
    Strides,
)


@pytest.fixture(autouse=True)
def nothing_is_free(monkeypatch):
    """Let the budget hold from the first decision on, however short steps are."""
    monkeypatch.setattr("sonde.record.governor.FREE_S", 0.0)


class Machine:
    """A training of which steps of each level take a known time, and a governor that only sees its clocks."""

    def __init__(self, budget, *, bare, cost, hidden=(0, 0, 0, 0), rests=False, disturbed=lambda step: 0.0):
        self.now = self.own = self.busy = 0.0
        self.bare, self.cost, self.hidden = bare, cost, hidden
        self.disturbed = disturbed
        self.decisions = []
        self.levels = []
        self.governor = Governor(
            budget,
            lambda: self.own,
            lambda level: None,
            self.decisions.append,
            rests=lambda: rests,
            clock=lambda: self.now,
            thread_clock=lambda: self.busy,
        )

    def run(self, steps, due=lambda step: True):
        for step in range(steps):
            level = self.governor.level if due(step) else NOTHING
            self.levels.append(level)
            taken = self.bare + self.cost[level] + self.hidden[level]
            self.now += taken + self.disturbed(step)
            self.busy += taken
            self.own += self.cost[level]
            self.governor.end_step(due=due(step), next_due=(due(step + 1), due(step + 2)))
        return self

    def share(self, since):
        """Return what recording really added since a step."""
        levels = self.levels[since:]
        return sum(self.cost[level] + self.hidden[level] for level in levels) / (len(levels) * self.bare)


def test_an_expensive_step_is_recorded_in_full_every_time():
    machine = Machine(0.05, bare=1.0, cost=(0, 0.005, 0.01, 0.02)).run(500)
    assert set(machine.levels) == {EVERYTHING}
    assert not machine.decisions


def test_other_programs_on_a_busy_machine_do_not_look_like_cost():
    chance = random.Random(0)
    cost = (0, 0.0005, 0.001, 0.002)
    disturbed = Machine(0.05, bare=0.1, cost=cost, rests=True, disturbed=lambda step: chance.random() ** 3).run(2000)
    assert disturbed.governor.strides == Machine(0.05, bare=0.1, cost=cost, rests=True).run(2000).governor.strides


def test_without_a_budget_all_tensors_are_recorded_whatever_it_costs_and_sensors_run_in_one_step_of_eight():
    machine = Machine(None, bare=0.001, cost=(0, 1, 2, 3)).run(2000)
    assert set(machine.levels[:SENSORS_ALWAYS]) == {EVERYTHING}
    assert set(machine.levels) == {EVERYTHING, OUTPUTS}
    assert 2000 / 8 <= machine.levels[SENSORS_ALWAYS:].count(EVERYTHING) <= 2000 / 8 + 24
    assert machine.levels[128:130] == [EVERYTHING] * 2  # a milestone, and the step after it


def test_short_steps_are_recorded_in_full_until_that_has_taken_a_second(monkeypatch):
    monkeypatch.setattr("sonde.record.governor.FREE_S", 1.0)
    machine = Machine(0.05, bare=0.001, cost=(0, 1e-3, 2e-3, 5e-3)).run(1000)
    assert set(machine.levels[:190]) == {EVERYTHING}
    assert machine.levels[300:].count(EVERYTHING) < 50


def test_the_first_steps_are_recorded_in_full():
    machine = Machine(0.05, bare=0.001, cost=(0, 0.01, 0.02, 0.03)).run(100)
    assert set(machine.levels[:FULL_STEPS]) == {EVERYTHING}


def test_what_is_done_once_must_fit_into_the_time_that_has_passed():
    machine = Machine(0.05, bare=0.1, cost=(0, 0.0001, 0.0002, 0.0003)).run(FULL_STEPS // 2)
    assert machine.governor.affords(0.1, 0.0)
    assert not machine.governor.affords(0.3, 0.0)  # of 1.2 s
    machine.run(500)
    assert machine.governor.affords(0.4, 0.0)  # of 51 s
    assert not machine.governor.affords(0.4, 0.2)
    assert Machine(None, bare=0.1, cost=(0, 0, 0, 0)).run(2).governor.affords(100.0, 0.0)


def test_the_first_steps_are_recorded_in_full_only_as_far_as_they_can_afford_it():
    machine = Machine(0.05, bare=0.03, cost=(0, 0.003, 0.006, 0.02)).run(FULL_STEPS)
    assert machine.levels[:2] == [EVERYTHING, EVERYTHING]
    assert EVERYTHING in machine.levels[2:]
    assert NOTHING in machine.levels[2:]
    assert machine.share(since=0) < 0.25  # two steps in full whatever they cost, then 10 % in all
    assert set(Machine(0.05, bare=0.03, cost=(0, 0.001, 0.0015, 0.0025)).run(FULL_STEPS).levels) == {EVERYTHING}


@pytest.mark.parametrize("scale", [0.5, 1, 3, 20])
def test_the_cost_stays_within_the_budget(scale):
    cost = tuple(scale * each * 1e-4 for each in (0, 2, 5, 12))
    machine = Machine(0.05, bare=0.01, cost=cost).run(4000)
    assert machine.share(since=200) <= 0.05 * 1.02
    assert PARAMETERS in machine.levels[200:] or EVERYTHING in machine.levels[200:]


@pytest.mark.parametrize("cost", [(0, 0.003, 0.016, 0.025), (0, 0.002, 0.01, 0.04), (0, 0.0005, 0.001, 0.03)])
def test_comparing_levels_stays_within_the_budget_too(cost):
    """Steps of 30 ms: from the first decision on, only milestones may come before they were earned."""
    machine = Machine(0.05, bare=0.03, cost=cost).run(2000)
    for stop in (45, 60, 100, 200, 2000):
        levels = machine.levels[FULL_STEPS:stop]
        milestones = sum(
            FULL_STEPS < step < stop for step in (32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536)
        )
        others = sum(cost[level] for level in levels) - milestones * cost[EVERYTHING]
        assert others <= 0.05 * 0.03 * len(levels) + cost[PARAMETERS]
    assert len([level for level in machine.levels[FULL_STEPS:] if level >= PARAMETERS]) > 30


def test_the_diagnosis_is_thinned_before_outputs_and_outputs_before_parameters():
    extras = Machine(0.05, bare=0.01, cost=(0, 1e-4, 2e-4, 15e-4)).run(400).governor.strides
    assert (extras.parameters, extras.outputs) == (1, 1)
    assert extras.extras > 1
    outputs = Machine(0.05, bare=0.01, cost=(0, 1e-4, 15e-4, 20e-4)).run(400).governor.strides
    assert outputs.parameters == 1
    assert outputs.extras >= outputs.outputs > 1


def test_nothing_ever_stops():
    machine = Machine(0.05, bare=1e-5, cost=(0, 1e-3, 2e-3, 4e-3)).run(40_000)
    assert EVERYTHING in machine.levels[10_000:]
    assert machine.share(since=1000) < 0.6  # the longest stride is bounded, so such a tiny step may exceed its budget


def test_a_few_steps_are_recorded_in_full_however_expensive_that_is():
    machine = Machine(0.05, bare=0.03, cost=(0, 0.01, 0.02, 0.03)).run(1025)
    whole = [step for step, level in enumerate(machine.levels) if level == EVERYTHING]
    assert {64, 96, 128, 192, 256, 384, 512, 768, 1024} <= set(whole)
    assert len(whole) < 40
    assert machine.share(since=200) < 0.06


def test_the_step_after_an_evaluation_is_recorded_in_full_three_times():
    machine = Machine(0.05, bare=0.03, cost=(0, 0.01, 0.02, 0.03)).run(2000)
    after = []
    for _ in range(5):
        for number in range(4):  # the passes of one evaluation
            machine.governor.evaluation_level(100 + number)
        after.append(machine.governor.level)
        machine.run(7)
    assert after[:3] == [EVERYTHING] * 3
    assert EVERYTHING not in after[3:]


def test_time_that_no_clock_of_ours_sees_counts_where_steps_are_compared():
    machine = Machine(0.05, bare=0.01, cost=(0, 1e-5, 1e-5, 1e-5), hidden=(0, 0, 2e-3, 2e-3), rests=True).run(2000)
    assert machine.governor.strides.outputs > 1
    assert machine.share(since=200) <= 0.05 * 1.02


def test_a_training_that_becomes_slower_is_recorded_more_often_again():
    machine = Machine(0.05, bare=0.001, cost=(0, 1e-4, 2e-4, 5e-4)).run(1000)
    thin = machine.governor.strides
    machine.bare = 0.1
    machine.run(2000)
    assert machine.governor.strides.extras < thin.extras


def test_steps_that_the_user_leaves_out_are_not_recorded_for_the_governor_either():
    machine = Machine(0.05, bare=0.01, cost=(0, 1e-3, 15e-4, 2e-3)).run(1000, due=lambda step: step % 10 == 0)
    assert all(level == NOTHING for step, level in enumerate(machine.levels) if step % 10)
    # One step in ten may cost a fifth of the budget: 1 % of all, half of what recording each in full would take.
    assert machine.share(since=200) <= 0.0105
    cheap = Machine(0.05, bare=0.01, cost=(0, 1e-4, 15e-5, 5e-4)).run(1000, due=lambda step: step % 10 == 0)
    assert {cheap.levels[step] for step in range(300, 1000, 10)} == {EVERYTHING}


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


def test_a_tiny_model_is_thinned_and_the_run_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr("sonde.record.governor.SHORT_STEP_S", 10.0)  # whatever else the machine is doing
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
    thinned = sonde.diagnose(run).thinned
    assert thinned["exploding_gradient"] == named[-1].data["parameters_every"], "a rule names what it did not see"


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


def test_steps_of_a_long_stride_are_steps_of_all_shorter_ones():
    strides = [Strides(parameters=1 << power, outputs=1 << power, extras=1 << power) for power in range(8)]
    chosen = [{step for step in range(4096) if each.level(step)} for each in strides]
    for shorter, longer in pairwise(chosen):
        assert longer < shorter
        assert len(longer) == len(shorter) // 2
        assert 0.3 < sum(step % 3 == 0 for step in longer) / len(longer) < 0.6, "no period of a loop is left out"


def test_the_next_recorded_step_is_the_first_with_a_level():
    for stride in (1, 2, 64, 1024):
        strides = Strides(stride, stride, stride)
        levels = [strides.level(step) for step in range(3000)]
        for step in range(0, 900, 7):
            assert strides.next_recorded(step) == next(each for each in range(step, 3000) if levels[each])


def train_tiny(path, steps, *, bad_at=None, evaluate_at=(), rate=lambda step: 0.01):
    """Train a model whose steps are so short that it dozes; return its run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(16, 4), torch.randint(2, (16,))
    with sonde.watch(model, optimizer, run=path, budget=0.05) as session:
        for step in range(1, steps + 1):
            optimizer.param_groups[0]["lr"] = rate(step)
            loss = nn.functional.cross_entropy(model(x), y)
            loss = loss * float("nan") if step == bad_at else loss
            optimizer.zero_grad()
            loss.backward()
            session.log(mine=step)
            optimizer.step()
            session.log(late=step)
            if step in evaluate_at:
                with torch.no_grad():
                    model(x)
    return model, sonde.open_run(path)


@pytest.fixture
def dozing(monkeypatch):
    """Decide, whatever the clocks say, that one step in 64 is recorded and the others are only counted."""

    def decide(governor):
        governor.strides, governor._dozing_pays, governor._next_review = Strides(64, 64, 64), True, 10**9

    lengths = []
    end_doze = Governor.end_doze

    def see(governor, steps, *rest):
        lengths.append(steps)
        end_doze(governor, steps, *rest)

    monkeypatch.setattr(Governor, "_review", decide)
    monkeypatch.setattr(Governor, "end_doze", see)
    return lengths


def test_a_tiny_model_dozes_and_no_step_or_logged_number_is_lost(tmp_path, dozing):
    _, run = train_tiny(tmp_path / "run", 1500)
    assert sum(dozing) > 700, "most steps are only counted"
    for name in ("mine", "late"):
        logged = run.series(name, "mean")
        assert logged.steps.tolist() == logged.values.tolist() == list(range(1, 1501))
    norms = run.series("0.weight:gradient", "norm")
    assert norms.steps.max() <= 1500
    assert run.steps[-1] == 1500
    assert run.series("loss", "mean").steps.tolist() == list(range(1, 1501)), "nor is a loss that is not logged"


def test_a_step_that_is_only_counted_runs_little_of_sonde(tmp_path, dozing):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(16, 4), torch.randint(2, (16,))
    calls = []

    def count(frame, event, argument):
        if event == "call" and "sonde" in frame.f_code.co_filename:
            calls[-1] += 1

    with sonde.watch(model, optimizer, run=tmp_path / "run", budget=0.05) as session:
        for step in range(1500):
            if step > 1200:
                calls.append(0)
                sys.setprofile(count)
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
            sys.setprofile(None)
    assert sum(dozing) > 1000
    assert sorted(calls)[len(calls) // 2] < 60, "130 with all hooks in place"


def test_steps_that_are_not_due_are_only_counted():
    machine = Machine(0.05, bare=0.01, cost=(1e-4, 1e-3, 15e-4, 2e-3)).run(200, due=lambda step: step % 10 == 0)
    governor = machine.governor
    governor.skips, governor.strides = True, Strides()
    for following in range(200, 210):
        until_due = (210 - following) % 10
        length = governor.doze_length(lambda ahead, following=following: (following + ahead) % 10 == 0)
        assert length == max(0, until_due - 1), "the step before a recorded one is looked at"


def test_steps_that_are_only_counted_show_how_long_a_bare_step_takes():
    machine = Machine(0.05, bare=1e-4, cost=(15e-5, 2e-4, 4e-4, 6e-4)).run(200)
    for _ in range(40):
        machine.governor.begin_doze()
        machine.now += 100 * (1e-4 + 2e-5)
        machine.governor.end_doze(100, 100, (True, True), 100 * 2e-5)
    assert machine.governor.cost().step_seconds == pytest.approx(1e-4)


def test_the_cost_counts_what_judging_and_occasional_work_take():
    machine = Machine(0.05, bare=0.1, cost=(0, 0.0001, 0.0002, 0.0003))
    machine.governor._aside_seconds = lambda: 0.01 * max(0.0, machine.now - 24 * 0.1)
    machine.run(300)
    assert machine.governor.cost().share == pytest.approx(0.003 + 0.0101, rel=0.1)


def test_a_learning_rate_that_is_wrong_for_one_counted_step_is_recorded(tmp_path, dozing):
    wrong = range(1000, 1040, 3)
    _, run = train_tiny(tmp_path / "run", 1100, rate=lambda step: 0.4 if step in wrong else 0.01)
    assert sum(dozing) > 300
    rates = run.series("*.group0.lr", "mean")
    assert rates.steps[rates.values > 0.1].tolist() == list(wrong)


def test_a_tape_that_begins_with_a_doze_holds_one_step(tmp_path, dozing, monkeypatch):
    wanted = [700, 760, 820]

    def due(recorder, number):
        return "early" if wanted and number >= wanted[0] and wanted.pop(0) else None

    monkeypatch.setattr(TapeRecorder, "_due", due)
    _, run = train_tiny(tmp_path / "run", 900)
    assert sum(dozing) > 100
    steps = [sum(mark.kind == "optimizer_enter" for mark in run.tape(step).marks) for step in run.tapes()]
    assert steps == [1, 1, 1]


def test_an_evaluation_and_a_loss_that_is_not_finite_end_a_doze(tmp_path, dozing):
    evaluated = list(range(801, 1201, 57))
    _, run = train_tiny(tmp_path / "run", 1300, bad_at=1250, evaluate_at=evaluated)
    assert sum(dozing) > 500
    passes = {site.name for site in run.sites if site.phase == "eval"}
    assert passes, "evaluations are recorded"
    assert [finding.step for finding in run.findings if "nan" in finding.kind] == [1250]


def test_a_doze_changes_nothing_of_the_training(tmp_path, dozing):
    watched, _ = train_tiny(tmp_path / "run", 900)
    assert sum(dozing) > 100
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(16, 4), torch.randint(2, (16,))
    for _ in range(900):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(watched.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("ill", [True, False])
def test_gradients_that_are_never_cleared_are_found_in_steps_that_record_parameters(tmp_path, monkeypatch, ill):
    """Looking at outputs is too expensive here, so few steps are recorded in full."""
    monkeypatch.setattr("sonde.record.governor.SHORT_STEP_S", 0.0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise", tape=False, budget=1e-6) as session:
        for _ in range(100):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            None if ill else optimizer.zero_grad()
    assert ("missing_zero_grad" in {finding.kind for finding in session.findings}) is ill
