from __future__ import annotations

from patients import asked, patient

from sonde.diagnosis.rules.padding_dominates import RULE
from sonde.facts import Facts, LossFacts


def run(valid):
    facts = Facts(losses=(LossFacts(kind="cross_entropy", classes=5, target_shape=(4, 25)),))
    sites = {"loss_fn:vital.valid_targets": [valid] * 10, "loss_fn:input.target": [[1.0] * 100] * 10}
    return asked(RULE, patient(sites, facts))


def test_batches_of_padding_are_worth_a_note():
    assert run(20.0).severity == "info"
    assert run(80.0) is None
