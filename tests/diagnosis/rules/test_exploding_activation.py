from __future__ import annotations

from patients import asked, patient

from sonde.diagnosis.rules.activations import exploding_activation


def run(growth, losses):
    outputs = [[growth**step, -1.0] for step in range(60)]
    return asked(exploding_activation, patient({"fc:output": outputs, "loss:scalar": losses}))


def test_outputs_that_grow_without_end_are_found():
    assert run(1.2, [2.3] * 60).severity == "warning"
    assert run(1.2, [2.3 - 0.03 * step for step in range(60)]).severity == "info"
    assert run(1.01, [2.3] * 60) is None


def test_outputs_that_are_large_from_the_start_are_not():
    assert asked(exploding_activation, patient({"fc:output": [[5000.0]] * 60, "loss:scalar": [2.3] * 60})) is None
