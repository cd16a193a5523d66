from __future__ import annotations

import pytest
from patients import asked, patient

from sonde.core.facts import Facts, LoaderFacts
from sonde.diagnosis.rules.loading import worker_rng_identical


@pytest.mark.parametrize(
    ("settings", "ill"),
    [
        ({"num_workers": 2, "generator_in_dataset": True}, True),
        ({"num_workers": 0, "generator_in_dataset": True}, False),
        ({"num_workers": 2, "generator_in_dataset": False}, False),
        ({"num_workers": 2, "generator_in_dataset": True, "worker_init_fn": True}, False),
    ],
)
def test_a_generator_copied_into_workers_is_found(settings, ill):
    found = asked(worker_rng_identical, patient({}, Facts(loader=LoaderFacts(kind="DataLoader", settings=settings))))
    assert (found is not None) is ill
