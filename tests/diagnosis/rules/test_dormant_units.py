from __future__ import annotations

from patients import asked, patient

from sonde.diagnosis.rules.activations import dormant_units


def run(active, samples):
    shares = [[1.0] * int(16 * active) + [0.0] * (16 - int(16 * active))] * 120
    return asked(dormant_units, patient({"act:vital.ever_active": shares, "act:vital.unit_samples": [samples] * 120}))


def test_a_layer_that_is_half_idle_is_worth_a_note():
    assert run(0.5, 5000).severity == "info"
    assert run(0.9, 5000) is None
    assert run(0.5, 100) is None
