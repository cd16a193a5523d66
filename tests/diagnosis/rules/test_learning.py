"""Whether a run learns: what can be told from the curve of its loss, and what cannot."""

from __future__ import annotations

import numpy as np
import pytest
from patients import patient

from sonde.core.facts import Facts, LossFacts
from sonde.diagnosis.learning import judge
from sonde.diagnosis.outlook import is_better_than_guessing, is_failing


def test_a_loss_that_takes_both_signs_and_stays_says_nothing():
    wavering = np.tile([-0.1, 0.2, 0.05, -0.2], 20)
    assert judge(wavering).state == "unknown"
    assert judge(np.abs(wavering) + 1).state == "flat"
    assert judge(np.linspace(1.0, -1.0, 80)).state == "improving"


def test_the_margin_is_what_noise_would_hide():
    generator = np.random.default_rng(0)
    quiet, loud = (judge(2 + scale * generator.standard_normal(100)) for scale in (0.001, 1.0))
    assert quiet.margin == pytest.approx(0.05 * quiet.initial)
    assert loud.margin > 0.5


@pytest.mark.parametrize(("reached", "failing"), [(2.3, True), (1.5, False)])
def test_coming_down_to_guessing_is_not_learning(reached, failing):
    losses = np.concatenate([np.linspace(4.0, 2.35, 20), np.full(40, reached)])
    facts = Facts(losses=(LossFacts(kind="cross_entropy", settings={"reduction": "mean"}, classes=10),))
    assert is_failing(patient({"loss_fn:output": list(losses)}, facts)) is failing


@pytest.mark.parametrize(("end", "state"), [(2.32, "flat"), (1.9, "improving")])
def test_a_fall_from_where_the_first_steps_threw_it_is_not_learning(end, state):
    wobble = 0.02 * np.random.default_rng(0).standard_normal(100)
    thrown = np.concatenate([[2.3, 900.0, 600.0, 90.0, 20.0], np.linspace(end + 0.4, end, 30), np.full(70, end)])
    thrown[5:] += wobble
    assert judge(thrown).state == state


def test_a_loss_that_begins_at_nothing_and_cannot_fall_says_nothing():
    rewarded = np.concatenate([np.zeros(20), np.tile([0.0, 0.4, 0.2], 20)])
    assert judge(rewarded).state == "unknown"
    assert judge(rewarded + 0.1).state != "unknown"


def noisy_labels(level, *, reduction="mean", first=0.69):
    scatter = 0.05 * np.random.default_rng(0).standard_normal(200)
    losses = np.concatenate([[first] * 3, np.full(197, level)]) + scatter
    facts = Facts(losses=(LossFacts(kind="cross_entropy", settings={"reduction": reduction}, classes=2),))
    return patient({"loss_fn:output": list(losses)}, facts, final=True)


@pytest.mark.parametrize(
    ("level", "more", "well"),
    [(0.63, {}, True), (0.68, {}, False), (0.69, {}, False), (0.63, {"reduction": "sum"}, False)],
)
def test_a_loss_just_below_that_of_guessing_was_learnt_if_it_is_certain(level, more, well):
    assert is_better_than_guessing(noisy_labels(level, **more)) is well


def test_a_model_that_began_as_well_as_it_is_has_not_learnt():
    assert not is_better_than_guessing(noisy_labels(0.5, first=0.5))


@pytest.mark.parametrize(("scatter", "well"), [(0.15, True), (0.02, False)])
def test_a_start_that_only_happens_to_be_low_is_one_near_guessing(scatter, well):
    losses = np.concatenate([np.full(5, 0.5), np.full(195, 0.48)]) + scatter * np.tile([1.0, -1.0, 0.0, 0.0], 50)
    facts = Facts(losses=(LossFacts(kind="cross_entropy", settings={"reduction": "mean"}, classes=2),))
    assert is_better_than_guessing(patient({"loss_fn:output": list(losses)}, facts)) is well


def test_a_single_first_loss_is_less_certain_than_five():
    scatter = np.random.default_rng(0).standard_normal(200)
    usual, thrown = np.full(200, 6.0) + scatter, np.concatenate([[2.0], np.full(199, 6.0) + scatter[1:]])
    assert judge(thrown).margin > 1.5 * judge(usual).margin


@pytest.mark.parametrize(("calls", "failing"), [(1, True), (2, False)])
def test_a_sum_over_time_steps_is_not_compared_with_a_guess_of_one(calls, failing):
    total = np.linspace(60.0, 20.0, 60)
    facts = Facts(losses=(LossFacts(kind="cross_entropy", settings={"reduction": "mean"}, classes=10),))
    sites = {"loss:scalar": list(total), "loss_fn:output": list(total / 20)}
    sites |= {f"loss_fn:output#{call}": list(total / 20) for call in range(1, calls)}
    assert is_failing(patient(sites, facts)) is failing


@pytest.mark.parametrize(("entropy", "state"), [(0.0, "unknown"), (1.5, "worse")])
def test_a_loss_with_a_single_label_may_rise_as_its_other_keys_get_harder(entropy, state):
    facts = Facts(losses=(LossFacts(kind="cross_entropy", settings={"reduction": "mean"}, classes=10),))
    losses = [2.1, *np.linspace(5.2, 3.3, 59)]
    case = patient({"loss_fn:output": losses, "loss_fn:vital.running_label_entropy": [entropy] * 60}, facts)
    assert case.learning.state == state
