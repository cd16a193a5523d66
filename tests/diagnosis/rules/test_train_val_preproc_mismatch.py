from __future__ import annotations

import numpy as np
import pytest
from patients import asked, patient

from sonde.diagnosis.rules.data import train_val_preproc_mismatch


def run(change):
    generator = np.random.default_rng(0)
    train = [generator.normal(size=(32, 4)) for _ in range(30)]
    evaluated = [None] * 29 + [change(generator.normal(size=(320, 4)))]
    return asked(train_val_preproc_mismatch, patient({"(model):input[0]": train, "(model):input[0]@eval": evaluated}))


@pytest.mark.parametrize("change", [lambda x: x * 255, lambda x: x + 2, lambda x: x / 10, lambda x: 1.8 * x + 3.2])
def test_evaluation_inputs_on_another_scale_are_found(change):
    assert run(change).sites[0] == "loader"


@pytest.mark.parametrize("change", [lambda x: x, lambda x: 0.8 * x, lambda x: x + 0.1])
def test_what_augmentation_changes_is_not(change):
    assert run(change) is None


@pytest.mark.parametrize(("validation", "severity"), [(0.2, "info"), (0.9, "warning"), (None, "warning")])
def test_a_shift_that_the_model_copes_with_is_a_note(validation, severity):
    generator = np.random.default_rng(0)
    readings = {
        "(model):input[0]": [generator.normal(size=(32, 4)) for _ in range(30)],
        "(model):input[0]@eval": [None] * 29 + [generator.normal(size=(320, 4)) + 2],
        "loss:scalar": list(np.linspace(1.0, 0.1, 30)),
    }
    if validation is not None:
        readings["val_loss:scalar"] = [None] * 26 + [validation] * 4
    found = asked(train_val_preproc_mismatch, patient(readings))
    assert (found.severity or "warning") == severity


def targets(change):
    generator = np.random.default_rng(0)
    inputs = {"(model):input[0]": [generator.normal(size=(32, 4)) for _ in range(30)]}
    inputs["(model):input[0]@eval"] = [None] * 29 + [generator.normal(size=(320, 4))]
    inputs["loss_fn:input.target"] = [generator.normal(size=32) for _ in range(30)]
    inputs["loss_fn:input.target@eval"] = [None] * 29 + [change(generator.normal(size=320))]
    return asked(train_val_preproc_mismatch, patient(inputs))


@pytest.mark.parametrize("change", [lambda y: 35 * y + 300, lambda y: y + 8, lambda y: y / 20])
def test_evaluation_targets_on_another_scale_are_found(change):
    assert "targets" in targets(change).cause


@pytest.mark.parametrize("change", [lambda y: y, lambda y: 4 * y, lambda y: y + 2])
def test_targets_of_another_part_of_the_data_are_not(change):
    assert targets(change) is None


def test_targets_that_are_compared_with_outputs_on_their_own_scale_are_not():
    numbers = np.random.default_rng(0).normal(size=(64, 1))
    prices = 11.8 + 0.4 * numbers
    sites = {
        "(model):input[0]": [numbers] * 20,
        "(model):input[0]@eval": [None] * 10 + [numbers] * 10,
        "loss_fn:input.target": [numbers] * 20,
        "loss_fn:input.target@eval": [None] * 10 + [prices] * 10,
        "loss_fn:input.input": [numbers] * 20,
        "loss_fn:input.input@eval": [None] * 10 + [prices] * 10,
    }
    assert asked(train_val_preproc_mismatch, patient(sites)) is None
    left = sites | {"loss_fn:input.input@eval": [None] * 10 + [numbers] * 10}
    assert "targets" in asked(train_val_preproc_mismatch, patient(left)).cause


@pytest.mark.parametrize(("follow", "severity"), [(2.0, "info"), (0.0, "warning")])
def test_a_later_part_of_a_series_that_outputs_follow_is_a_note(follow, severity):
    generator = np.random.default_rng(0)
    readings = {}
    for name, later in (("(model):input[0]", 2.0), ("loss_fn:input.target", 2.0), ("loss_fn:input.input", follow)):
        readings[name] = [generator.normal(size=(32, 4)) for _ in range(30)]
        readings[f"{name}@eval"] = [None] * 29 + [generator.normal(size=(320, 4)) + later]
    found = asked(train_val_preproc_mismatch, patient(readings))
    assert (found.severity or "warning") == severity
