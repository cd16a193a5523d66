from __future__ import annotations

import pytest
from patients import asked, patient

from sonde.core.facts import Facts, ModuleFacts, ParameterFacts
from sonde.diagnosis.rules.architecture import linear_stack


def run(between="Identity", width=32, name="fc2"):
    modules = [
        ModuleFacts(name="fc1", kind="Linear"),
        ModuleFacts(name=name, kind="Linear"),
        ModuleFacts(name="fc3", kind="Linear"),
    ]
    modules += [ModuleFacts(name="one", kind=between), ModuleFacts(name="two", kind=between)]
    shapes = {"fc1": (width, 32), name: (32, width), "fc3": (32, 32)}
    facts = Facts(
        modules=tuple(modules),
        parameters=tuple(ParameterFacts(name=f"{name}.weight", shape=shape) for name, shape in shapes.items()),
        edges=(("fc1", "one"), ("one", name), (name, "two"), ("two", "fc3")),
    )
    return asked(linear_stack, patient({"loss:scalar": [2.0] * 30}, facts))


@pytest.mark.parametrize("between", ["Identity", "Dropout"])
def test_layers_with_nothing_that_bends_between_them_are_found(between):
    found = run(between)
    assert found.severity == "warning"
    assert found.sites == ("fc1", "fc2", "fc3")


def test_activations_and_names_of_adapters_clear_it_and_a_waist_leaves_only_one_pair():
    assert run("ReLU") is None
    assert run(name="lora_up") is None
    assert run(width=4).severity == "info"
