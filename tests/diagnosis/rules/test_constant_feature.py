from __future__ import annotations

import numpy as np
from patients import asked, patient

from sonde.diagnosis.rules.data import constant_feature


def run(constant):
    scales = [[0.0] * constant + [1.0] * (10 - constant)] * 5
    x = np.random.default_rng(0).normal(size=(64, 10))
    return asked(constant_feature, patient({"(model):input[0]": [x] * 5, "(model):vital.column_scale": scales}))


def test_a_table_that_is_mostly_constant_is_worth_a_note():
    assert run(7).severity == "info"
    assert run(2) is None
