from __future__ import annotations

from patients import asked, patient

from sonde.diagnosis.rules.starved_loader import RULE


def run(wait, step):
    return asked(RULE, patient({"(loop):vital.data_wait": [wait] * 40, "(loop):vital.step_time": [step] * 40}))


def test_a_loop_that_waits_is_found():
    assert run(0.6, 1.0).severity == "warning"
    assert run(0.4, 1.0).severity == "info"


def test_a_fast_loader_and_a_tiny_program_are_not():
    assert run(0.05, 1.0) is None
    assert run(0.002, 0.003) is None
