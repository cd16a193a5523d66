from __future__ import annotations

import numpy as np
from patients import asked, patient

from sonde.diagnosis.rules.activations import attention_entropy_collapse


def run(entropies, losses):
    return asked(
        attention_entropy_collapse, patient({"attn:vital.attention_entropy": entropies, "loss:scalar": losses})
    )


FLAT, FALLING = [2.3] * 60, [2.3 - 0.03 * step for step in range(60)]


def test_attention_that_narrows_to_one_place_is_found():
    narrowing = list(np.linspace(0.95, 0.02, 60))
    assert run(narrowing, FLAT).severity == "warning"
    assert run(narrowing, FALLING).severity == "info"
    assert run([0.1] * 60, FLAT).severity == "warning"


def test_one_narrow_head_of_four_is_normal():
    assert run([[0.02, 0.9, 0.9, 0.9]] * 60, FLAT) is None
