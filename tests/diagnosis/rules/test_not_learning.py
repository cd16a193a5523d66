from __future__ import annotations

import numpy as np
from patients import asked, patient

from sonde.core.facts import Facts, LossFacts
from sonde.diagnosis.rules.outcomes import not_learning


def run(losses, final):
    return asked(not_learning, patient({"loss:scalar": losses}, final=final))


def test_a_run_that_ends_where_it_began_is_a_warning_only_then():
    flat = [2.3 + 0.01 * (-1) ** step for step in range(120)]
    assert run(flat, True).severity == "warning"
    assert run(flat, False).severity == "info"
    assert run([2.3 - 0.01 * step for step in range(120)], True) is None


def test_a_loss_that_fell_by_no_more_than_it_scatters_may_have_been_learnt():
    scatter = 0.5 * np.random.default_rng(0).standard_normal(200)
    flat, fallen = 7 + scatter, np.concatenate([np.full(5, 7.0), np.full(195, 6.5)]) + scatter
    assert run(list(flat), True).severity == "warning"
    assert run(list(fallen), True) is None


def test_where_the_targets_move_a_flat_loss_is_worth_a_note_only():
    rng = np.random.default_rng(0)

    def severity(drift):
        targets = [rng.normal(drift * step, 1, 64) for step in range(120)]
        readings = {"loss:scalar": [0.5] * 120, "loss_fn:input.input": targets, "loss_fn:input.target": targets}
        return asked(not_learning, patient(readings, kinds={"loss_fn:input.input": "mse_loss"}, final=True)).severity

    assert severity(0.0) == "warning"
    assert severity(0.01) == "info"


def test_what_is_learnt_from_noisy_labels_counts():
    def severity(level):
        scatter = 0.06 * np.random.default_rng(1).standard_normal(200)
        facts = Facts(losses=(LossFacts(kind="cross_entropy", settings={"reduction": "mean"}, classes=2),))
        return asked(not_learning, patient({"loss_fn:output": list(level + scatter)}, facts, final=True))

    learnt = np.concatenate([np.linspace(0.69, 0.64, 5), np.full(195, 0.64)])
    assert severity(learnt) is None
    assert severity(np.full(200, 0.69)).severity == "warning"
