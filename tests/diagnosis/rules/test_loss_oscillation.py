from __future__ import annotations

from patients import asked, patient

from sonde.diagnosis.rules.outcomes import loss_oscillation


def test_a_loss_that_swings_is_worth_a_note():
    assert asked(loss_oscillation, patient({"loss:scalar": [2.0, 0.5] * 40})).severity == "info"
    assert asked(loss_oscillation, patient({"loss:scalar": [2.0, 1.8] * 40})) is None
