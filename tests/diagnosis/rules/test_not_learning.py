from __future__ import annotations

from patients import asked, patient

from sonde.diagnosis.rules.not_learning import RULE


def run(losses, final):
    return asked(RULE, patient({"loss:scalar": losses}, final=final))


def test_a_run_that_ends_where_it_began_is_a_warning_only_then():
    flat = [2.3 + 0.01 * (-1) ** step for step in range(120)]
    assert run(flat, True).severity == "warning"
    assert run(flat, False).severity == "info"
    assert run([2.3 - 0.01 * step for step in range(120)], True) is None
