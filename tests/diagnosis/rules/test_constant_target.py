from __future__ import annotations

import numpy as np
import pytest
from handmade import ask, found, loss, model, optimizer, patient

ZEROS, SPREAD = np.zeros(16), np.linspace(-1, 1, 16)


def held_against(*targets, kind="mse_loss", made_by="addmm", steps=30, final=False, **more):
    readings = {
        "loss_fn:input.input": [SPREAD] * steps,
        "loss_fn:input.target": [targets[at % len(targets)] for at in range(steps)],
    }
    about = {key: {"kind": kind, "dtype": "float32"} for key in readings}
    facts = model("a.weight", losses=(loss(kind, made_by=made_by),), **more)
    return patient(readings, facts, about=about, final=final)


def test_targets_that_are_all_one_number_are_named():
    finding = found("constant_target", held_against(ZEROS))
    assert finding.severity == "warning"
    assert "Every target is 0" in finding.cause
    assert found("constant_target", held_against(ZEROS + 1, kind="binary_cross_entropy", final=True))
    assert found("constant_target", held_against(ZEROS, kind="cross_entropy", final=True))
    pairs = held_against(ZEROS + 1, kind="binary_cross_entropy_with_logits", made_by="sum", final=True)
    assert found("constant_target", pairs)


@pytest.mark.parametrize(
    "case",
    [
        held_against(SPREAD),
        held_against(ZEROS, ZEROS + 1),  # batch by batch
        held_against(ZEROS, made_by="sub"),  # a residual that is to become 0
        held_against(ZEROS, steps=10),
        held_against(ZEROS + 1, kind="binary_cross_entropy"),  # may come class by class
        held_against(ZEROS + 1, kind="cross_entropy"),
        held_against(ZEROS, kind="cross_entropy", made_by="div", final=True),  # the positive comes first
        held_against(ZEROS, optimizers=(optimizer("a.weight"), optimizer("b.weight", name="optimizer2"))),
    ],
)
def test_targets_that_differ_residuals_and_games_are_well(case):
    assert ask("constant_target", case) is None
