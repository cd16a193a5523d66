from __future__ import annotations

from patients import asked, patient

from sonde.diagnosis.rules.outcomes import loss_spike


def run(losses):
    return asked(loss_spike, patient({"loss:scalar": losses}))


CALM = [2.0 - 0.01 * step for step in range(100)]


def test_a_single_leap_is_worth_a_note():
    assert run([*CALM[:60], 30.0, *CALM[60:]]).data["steps"] == [61]


def test_a_calm_loss_and_one_with_a_heavy_tail_are_not():
    assert run(CALM) is None
    assert run([30.0 if step % 8 == 0 else loss for step, loss in enumerate(CALM)]) is None
