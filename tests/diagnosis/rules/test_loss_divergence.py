from __future__ import annotations

from patients import asked, patient

from sonde.diagnosis.rules.loss_divergence import RULE


def run(losses):
    return asked(RULE, patient({"loss:scalar": losses}))


def test_a_loss_that_leaves_its_level_or_is_no_number_is_found():
    assert run([2.0 - 0.02 * step for step in range(60)] + [9.0] * 30).severity == "warning"
    assert run([2.0] * 20 + [float("nan")]).severity == "critical"


def test_a_falling_loss_and_a_moment_of_trouble_are_not():
    assert run([2.0 - 0.02 * step for step in range(60)]) is None
    assert run([2.0 - 0.02 * step for step in range(60)] + [9.0] * 3 + [0.8] * 20) is None
