from __future__ import annotations

import numpy as np
from patients import asked, patient

from sonde.core.facts import Facts, LossFacts
from sonde.diagnosis.rules.outcomes import loss_plateau, underfitting


def run(last, final=True):
    return asked(
        underfitting, patient({"loss:scalar": [2.3 - (2.3 - last) * step / 149 for step in range(150)]}, final=final)
    )


def test_a_run_that_learnt_little_is_worth_a_note_at_its_end():
    assert run(2.0).severity == "info"
    assert run(2.0, final=False) is None
    assert run(0.5) is None


def ends_at(level, *, falls=0.0):
    noise = 0.01 * np.random.default_rng(0).normal(size=500)
    curve = np.concatenate([np.linspace(level * 1.1, level, 100), np.linspace(level, level - falls, 400)]) + noise
    facts = Facts(losses=(LossFacts(kind="cross_entropy", settings={"reduction": "mean"}, classes=10),))
    return patient({"loss:scalar": curve.tolist()}, facts, final=True)


def test_a_run_that_ends_where_guessing_would_and_stands_still_is_a_warning():
    stuck, learning, above_chance = ends_at(np.log(10)), ends_at(np.log(10), falls=0.4), ends_at(1.5)
    for rule in (underfitting, loss_plateau):
        assert asked(rule, stuck).severity == "warning"
        for case in (learning, above_chance):
            found = asked(rule, case)
            assert found is None or found.severity == "info"
