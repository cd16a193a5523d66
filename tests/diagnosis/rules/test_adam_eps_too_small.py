from __future__ import annotations

import pytest
from patients import asked, patient

from sonde.core.facts import Facts, GroupFacts, OptimizerFacts, ParameterFacts
from sonde.diagnosis.rules.optimizers import adam_eps_too_small


@pytest.mark.parametrize(
    ("dtype", "eps", "ill"),
    [("float16", 1e-8, True), ("float16", 1e-4, False), ("float32", 1e-8, False), ("bfloat16", 1e-8, False)],
)
def test_an_eps_that_is_zero_in_float16_is_found(dtype, eps, ill):
    group = GroupFacts(settings={"eps": eps}, parameters=("w",))
    facts = Facts(
        parameters=(ParameterFacts(name="w", dtype=dtype),),
        optimizers=(OptimizerFacts(name="optimizer", kind="Adam", groups=(group,)),),
    )
    assert (asked(adam_eps_too_small, patient({}, facts)) is not None) is ill
