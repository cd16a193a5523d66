from __future__ import annotations

import numpy as np
from patients import asked, patient

from sonde.diagnosis.rules.not_learning import RULE


def run(losses, final):
    return asked(RULE, patient({"loss:scalar": losses}, final=final))


def test_a_run_that_ends_where_it_began_is_a_warning_only_then():
    flat = [2.3 + 0.01 * (-1) ** step for step in range(120)]
    assert run(flat, True).severity == "warning"
    assert run(flat, False).severity == "info"
    assert run([2.3 - 0.01 * step for step in range(120)], True) is None


def test_where_the_targets_move_a_flat_loss_is_worth_a_note_only():
    rng = np.random.default_rng(0)

    def severity(drift):
        targets = [rng.normal(drift * step, 1, 64) for step in range(120)]
        readings = {"loss:scalar": [0.5] * 120, "loss_fn:input.input": targets, "loss_fn:input.target": targets}
        return asked(RULE, patient(readings, kinds={"loss_fn:input.input": "mse_loss"}, final=True)).severity

    assert severity(0.0) == "warning"
    assert severity(0.01) == "info"
