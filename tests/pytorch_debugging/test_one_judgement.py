"""The debugger says what the doctor says, or says in words that it looks at one step only."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import nn

from sonde.diagnosis.judgement import Curves, judge_curves

WEIGHT_NORM = 4.0
STEADY = 60
CURVES = {
    **{f"steady at {value:g}": [value] * STEADY for value in (1.0, 50.0, 2000.0, 3e4, 1e-7, 5e-14)},
    **{f"last step x{factor}": [1.0] * STEADY + [float(factor)] for factor in (8, 15, 150)},
    **{f"last step x{factor:g}": [1.0] * STEADY + [factor] for factor in (1e-2, 1e-5)},
    "x1000 that stays": [1.0] * 30 + [1000.0] * 10,
    "doubling each step": [1.0] * 30 + [2.0**power for power in range(12)],
    "one NaN": [1.0] * STEADY + [math.nan],
    "slow decay": [0.97**step for step in range(STEADY)],
}
WORDS = {"gradient_explosion": "exploding", "gradient_vanishing": "vanishing", "nan_gradient_detected": "non-finite"}


def watched(make, norms):
    """Return the debugger after it has checked gradients of these norms."""
    debugger, model = make(), nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        model.weight.mul_(WEIGHT_NORM / model.weight.norm())
    model.weight.grad = torch.zeros_like(model.weight)
    for norm in norms:
        model.weight.grad.fill_(norm / 4.0)
        debugger.check_gradients(model)
    return debugger


def doctor(norms):
    curves = Curves(gradients={"weight": norms}, parameters={"weight": [WEIGHT_NORM] * len(norms)})
    return set(judge_curves(curves).verdicts("weight")) & set(WORDS.values())


@pytest.mark.parametrize("name", CURVES)
def test_a_curve_is_judged_as_by_the_doctor_or_for_one_step_in_words(make, name):
    debugger, found = watched(make, CURVES[name]), doctor(CURVES[name])
    said = {WORDS[entry["event_type"]] for entry in debugger.gradient_violations}
    assert found <= said, "what the doctor finds is reported"
    for entry in debugger.gradient_violations:
        if WORDS[entry["event_type"]] not in found and "NaN" not in entry["message"]:
            assert "at this step only" in entry["message"]


EXPECTED = {
    **{f"steady at {value}": {} for value in ("1", "50", "2000", "1e-07")},
    "steady at 30000": {"exploding": STEADY},  # more than a thousand times its weights
    "steady at 5e-14": {"vanishing": STEADY},  # float32 rounds such a step away
    **{f"last step x{factor}": {} for factor in ("8", "15", "0.01")},
    "last step x150": {"exploding": 1},
    "last step x1e-05": {"vanishing": 1},
    "one NaN": {"non-finite": 1, "exploding": 1},
    "slow decay": {},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_checks_count_as_expected(make, name):
    entries = watched(make, CURVES[name]).gradient_violations
    assert Counter(WORDS[entry["event_type"]] for entry in entries) == EXPECTED[name]
