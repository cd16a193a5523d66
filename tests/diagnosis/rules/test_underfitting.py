from __future__ import annotations

from patients import asked, patient

from sonde.diagnosis.rules.outcomes import underfitting


def run(last, final=True):
    return asked(
        underfitting, patient({"loss:scalar": [2.3 - (2.3 - last) * step / 149 for step in range(150)]}, final=final)
    )


def test_a_run_that_learnt_little_is_worth_a_note_at_its_end():
    assert run(2.0).severity == "info"
    assert run(2.0, final=False) is None
    assert run(0.5) is None
