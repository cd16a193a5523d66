from __future__ import annotations

from patients import asked, patient

from sonde.core.facts import Facts, GroupFacts, OptimizerFacts, ParameterFacts
from sonde.diagnosis.rules.optimizers import weight_decay_on_norm_bias


def run(decay):
    group = GroupFacts(settings={"weight_decay": decay}, parameters=("norm.weight", "fc.weight"))
    parameters = (
        ParameterFacts(name="norm.weight", shape=(8,), kind="LayerNorm"),
        ParameterFacts(name="fc.weight", shape=(8, 8), kind="Linear"),
    )
    facts = Facts(parameters=parameters, optimizers=(OptimizerFacts(name="optimizer", kind="AdamW", groups=(group,)),))
    return asked(weight_decay_on_norm_bias, patient({}, facts))


def test_a_chosen_decay_on_norms_is_worth_a_note_and_the_default_is_not():
    assert run(0.1).sites == ("norm.weight",)
    assert run(0.1).severity == "info"
    assert run(0.01) is None
