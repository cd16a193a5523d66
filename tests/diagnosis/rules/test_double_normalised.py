from __future__ import annotations

import numpy as np
from patients import asked, patient

from sonde.diagnosis.rules.data import double_normalised


def run(scale, losses):
    x = np.random.default_rng(0).uniform(0, 1, size=(64, 10)) * scale
    return asked(double_normalised, patient({"(model):input[0]": [x] * len(losses), "loss:scalar": losses}))


def test_inputs_divided_by_255_once_too_often_are_found():
    assert run(1 / 255, [2.3] * 40).severity == "warning"
    assert run(1 / 255, [2.3 - 0.03 * step for step in range(40)]).severity == "info"
    assert run(1.0, [2.3] * 40) is None
