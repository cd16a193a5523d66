"""Whether a run learns: what can be told from the curve of its loss, and what cannot."""

from __future__ import annotations

import numpy as np
import pytest
from patients import patient

from sonde.diagnosis.learning import judge
from sonde.diagnosis.outlook import is_failing
from sonde.facts import Facts, LossFacts


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
def test_coming_down_to_guessing_is_no_learning(reached, failing):
    losses = np.concatenate([np.linspace(4.0, 2.35, 20), np.full(40, reached)])
    facts = Facts(losses=(LossFacts(kind="cross_entropy", settings={"reduction": "mean"}, classes=10),))
    assert is_failing(patient({"loss_fn:output": list(losses)}, facts)) is failing


@pytest.mark.parametrize(("end", "state"), [(2.32, "flat"), (1.9, "improving")])
def test_a_fall_from_where_the_first_steps_threw_it_is_no_learning(end, state):
    wobble = 0.02 * np.random.default_rng(0).standard_normal(100)
    thrown = np.concatenate([[2.3, 900.0, 600.0, 90.0, 20.0], np.linspace(end + 0.4, end, 30), np.full(70, end)])
    thrown[5:] += wobble
    assert judge(thrown).state == state
