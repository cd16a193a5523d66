from __future__ import annotations

import numpy as np
from patients import asked, patient

from sonde.diagnosis.rules.data import data_leakage


def run(leaks, name):
    generator = np.random.default_rng(0)
    train = [generator.normal(size=(8, 4)) for _ in range(30)]
    evaluated = [None] * 30
    for end in (9, 19, 29):
        other = generator.normal(size=(80, 4))
        evaluated[end] = np.concatenate(train[end - 9 : end + 1])[::-1] if leaks else other
    return asked(
        data_leakage,
        patient({"(model):input[0]": train, "(model):input[0]@eval": evaluated, f"{name}:scalar": [1.0] * 30}),
    )


def test_a_validation_on_what_was_trained_on_is_found():
    assert run(True, "val_loss").severity == "warning"
    assert run(True, "loss").severity == "info"
    assert run(False, "val_loss") is None
