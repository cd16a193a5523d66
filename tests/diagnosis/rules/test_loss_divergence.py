from __future__ import annotations

from patients import asked, patient

from sonde.diagnosis.rules.numerics import nan_in_loss
from sonde.diagnosis.rules.outcomes import loss_divergence


def run(losses):
    return asked(loss_divergence, patient({"loss:scalar": losses}))


def test_a_loss_that_leaves_its_level_is_found():
    assert run([2.0 - 0.02 * step for step in range(60)] + [9.0] * 30).severity == "warning"


def test_a_logged_loss_that_is_nan_is_called_nan_and_not_diverging():
    losses = [2.0] * 20 + [float("nan")]
    assert run(losses) is None
    found = asked(nan_in_loss, patient({"loss:scalar": losses}))
    assert (found.severity, found.step) == ("critical", 21)
    assert found.cause.startswith("The loss is NaN, since step 21")


def test_a_falling_loss_and_a_moment_of_trouble_are_not():
    assert run([2.0 - 0.02 * step for step in range(60)]) is None
    assert run([2.0 - 0.02 * step for step in range(60)] + [9.0] * 3 + [0.8] * 20) is None
