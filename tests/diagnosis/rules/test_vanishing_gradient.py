from __future__ import annotations

import pytest
import torch
from patients import asked, patient
from programs import data, kinds, train

from sonde.diagnosis.rules.gradients import vanishing_gradient

FLAT, FALLING = [2.3] * 60, [2.3 - 0.03 * step for step in range(60)]


def one_weight(gradient, losses=FLAT, **more):
    curves = {"gradient": gradient, "parameter": [1.0] * 60} | more
    sites = {f"a.weight:{quantity}": values for quantity, values in curves.items()}
    shapes = dict.fromkeys(sites, (1, 1))
    return asked(vanishing_gradient, patient(sites | ({"loss:scalar": losses} if losses else {}), shapes=shapes))


def deep(act):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 16), act()]
    for _ in range(7):
        layers += [torch.nn.Linear(16, 16), act()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(16, 3))


@pytest.mark.parametrize("act", [torch.nn.Sigmoid, torch.nn.ELU])
def test_eight_sigmoids_let_nothing_through(tmp_path, act):
    model = deep(act)
    found = train(tmp_path, model, torch.optim.Adam(model.parameters(), lr=1e-3), *data())
    assert (kinds(found, notes=False)[:1] == ["vanishing_gradient"]) is (act is torch.nn.Sigmoid)
    if act is torch.nn.Sigmoid:
        assert found[0].sites[0] == "0.weight"


@pytest.mark.parametrize("level", [5.7e-14, 0.0])
def test_a_gradient_that_cannot_change_its_weight_is_found_unless_the_run_learns(level):
    assert one_weight([level] * 60).severity == "warning"
    assert one_weight([level] * 60, None).severity == "warning"
    assert one_weight([level] * 60, FALLING) is None
    assert one_weight([1e-7] * 60) is None


def test_steps_that_float32_rounds_away_are_found_and_those_of_a_scaling_optimizer_are_not():
    assert one_weight([1e-8] * 60, update=[1e-9] * 60).evidence[0].threshold == 2.0**-24
    assert one_weight([1e-8] * 60, update=[1e-3] * 60) is None
    assert one_weight([5.7e-14] * 60, update=[1e-3] * 60) is None


def test_a_gradient_that_has_faded_since_the_first_steps_is_found_unless_the_run_learns():
    faded = [1.0] * 40 + [1e-5] * 20
    assert one_weight(faded).severity == "warning"
    assert one_weight(faded, None).severity == "info"
    assert one_weight(faded, FALLING) is None
    assert one_weight([1.0] * 50 + [1e-5] * 10) is None


def test_a_loss_that_never_reaches_a_weight_is_a_warning_even_if_it_is_zero():
    found = one_weight([0.0] * 60, [0.0] * 60)
    assert found.severity == "warning"
    assert found.cause.startswith("Every gradient has been exactly zero since the first step")
    learnt = one_weight([0.1] * 5 + [0.0] * 55, [1.0] * 5 + [0.0] * 55)
    assert learnt is None or learnt.severity == "info", "a margin that was learnt"
