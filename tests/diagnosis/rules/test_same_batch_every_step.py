from __future__ import annotations

import numpy as np
import pytest
from patients import asked, patient

from sonde.core.facts import Facts, LoaderFacts
from sonde.diagnosis.rules.loading import same_batch_every_step

BATCH = np.random.default_rng(0).normal(size=(8, 4))


def run(batches, waits=None, length=9):
    facts = Facts(loader=LoaderFacts(kind="DataLoader", settings={"length": length}))
    sites = {"(model):input[0]": batches}
    return asked(
        same_batch_every_step, patient(sites if waits is None else sites | {"(loop):vital.data_wait": waits}, facts)
    )


def test_a_loader_that_is_asked_and_gives_the_same_is_a_warning():
    assert run([BATCH] * 20, [0.001] * 20).severity == "warning"


def test_one_batch_on_purpose_is_a_note_and_several_batches_or_a_single_one_are_nothing():
    assert run([BATCH] * 20).severity == "info"
    assert run([BATCH] * 20, length=1) is None
    assert run([BATCH] * 19 + [BATCH + 1]) is None


@pytest.mark.parametrize(
    ("held_out", "end", "severity"), [(30, 2.0, "warning"), (8, 2.0, "info"), (30, 0.05, "info"), (30, None, "info")]
)
def test_a_batch_that_is_learnt_by_heart_is_smaller_than_what_is_held_out_and_says_nothing_of_it(
    held_out, end, severity
):
    shapes = {"(model):input[0]": (8, 4), "(model):input[0]@eval": (held_out, 4)}
    sites = {"(model):input[0]": [BATCH] * 20, "(model):input[0]@eval": [BATCH] * 20}
    sites |= {"loss:scalar": list(np.linspace(2, 0.01, 20))}
    if end is not None:
        sites |= {"val_loss:scalar": list(np.linspace(2, end, 20))}
    assert asked(same_batch_every_step, patient(sites, shapes=shapes)).severity == severity
