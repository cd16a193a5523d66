from __future__ import annotations

from patients import asked, patient

from sonde.diagnosis.rules.overfitting import RULE


def run(last):
    losses = [2.0 - 0.018 * step for step in range(100)]
    best = [1.5, 1.2, 1.0]
    later = [1.0 + (last - 1.0) * (at + 1) / 7 for at in range(7)]
    values = [None] * 100
    values[9::10] = best + later
    return asked(RULE, patient({"loss:scalar": losses, "val_loss:scalar": values}))


def test_a_validation_loss_that_rises_while_training_goes_on_is_found():
    assert run(2.0).severity == "warning"
    assert run(2.0).step == 30
    assert run(1.3).severity == "info"


def test_a_validation_loss_that_keeps_falling_is_not():
    assert run(0.6) is None
