from __future__ import annotations

import numpy as np
from patients import asked, patient

from sonde.diagnosis.rules.outcomes import loss_plateau


def run(last):
    noise = 0.02 * np.random.default_rng(0).normal(size=500)
    curve = np.concatenate([np.linspace(2.3, 1.7, 100), np.linspace(1.7, last, 400)]) + noise
    return asked(loss_plateau, patient({"loss:scalar": curve.tolist()}))


def test_a_loss_that_stands_still_at_a_high_level_is_worth_a_note():
    assert run(1.7).severity == "info"
    assert run(1.2) is None
    assert run(0.2) is None
