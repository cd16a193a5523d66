from __future__ import annotations

from patients import asked, patient

from sonde.diagnosis.rules.loading import starved_loader


def run(wait, step):
    return asked(
        starved_loader, patient({"(loop):vital.data_wait": [wait] * 40, "(loop):vital.step_time": [step] * 40})
    )


def test_a_loop_that_waits_is_found():
    assert run(0.6, 1.0).severity == "warning"
    assert run(0.4, 1.0).severity == "info"


def test_a_fast_loader_and_a_tiny_program_are_not():
    assert run(0.05, 1.0) is None
    assert run(0.002, 0.003) is None


def test_a_few_long_waits_of_a_busy_machine_are_not():
    waits = [5.0 if at % 16 == 0 else 0.01 for at in range(64)]
    times = [wait + 0.5 for wait in waits]
    assert asked(starved_loader, patient({"(loop):vital.data_wait": waits, "(loop):vital.step_time": times})) is None


def test_waits_that_have_stopped_are_not():
    waits = [0.9] * 48 + [0.01] * 16
    assert (
        asked(starved_loader, patient({"(loop):vital.data_wait": waits, "(loop):vital.step_time": [1.0] * 64})) is None
    )


def test_workers_that_deliver_in_bursts_are_found():
    waits = [0.0, 0.0, 0.0, 4.0] * 16
    times = [wait + 0.5 for wait in waits]
    assert (
        asked(starved_loader, patient({"(loop):vital.data_wait": waits, "(loop):vital.step_time": times})).severity
        != "info"
    )
