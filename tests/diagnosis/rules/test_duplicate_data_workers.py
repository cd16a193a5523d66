from __future__ import annotations

import numpy as np
from patients import asked, patient

from sonde.core.facts import Facts, LoaderFacts
from sonde.diagnosis.rules.loading import duplicate_data_workers


def run(order, workers=2):
    generator = np.random.default_rng(0)
    batches = [generator.normal(size=(8, 4)) for _ in range(max(order) + 1)]
    facts = Facts(loader=LoaderFacts(kind="DataLoader", settings={"num_workers": workers}))
    return asked(duplicate_data_workers, patient({"(model):input[0]": [batches[at] for at in order]}, facts))


def test_batches_that_come_once_per_worker_are_found():
    assert run([at // 2 for at in range(20)]).sites == ("loader",)
    assert run([at // 4 for at in range(40)], workers=4).severity == "warning"


def test_epochs_and_a_single_batch_are_not():
    assert run([at % 10 for at in range(40)]) is None
    assert run([0] * 40) is None
