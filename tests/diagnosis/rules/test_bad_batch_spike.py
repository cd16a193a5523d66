from __future__ import annotations

import numpy as np
from patients import asked, patient

from sonde.diagnosis.rules.loading import bad_batch_spike


def run(bad):
    generator = np.random.default_rng(0)
    batches = [generator.normal(size=(8, 4)) for _ in range(20)]
    losses = [1.0 + 0.01 * generator.normal() for _ in range(100)]
    for step in bad:
        losses[step] = 20.0
    return asked(
        bad_batch_spike,
        patient({"(model):input[0]": [batches[step % 20] for step in range(100)], "loss:scalar": losses}),
    )


def test_a_batch_that_hurts_each_time_is_found():
    found = run([7, 27, 47, 67, 87])
    assert found.severity == "warning"
    assert found.data["steps"][:2] == [8, 28]


def test_spikes_at_different_batches_are_not():
    assert run([7, 30, 55]) is None
