from __future__ import annotations

import numpy as np
from patients import asked, patient

from sonde.diagnosis.rules.data import constant_feature


def run(constant):
    scales = [[0.0] * constant + [1.0] * (10 - constant)] * 5
    x = np.random.default_rng(0).normal(size=(64, 10))
    return asked(constant_feature, patient({"(model):input[0]": [x] * 5, "(model):vital.column_scale": scales}))


def test_a_table_that_is_mostly_constant_is_worth_a_note():
    assert run(7).severity == "info"
    assert run(2) is None


def fed(batches, losses):
    return asked(constant_feature, patient({"(model):input[0]": batches, "loss:scalar": losses}))


def test_inputs_that_are_one_number_are_found_and_named():
    same = [np.zeros((8, 10))] * 40
    assert fed(same, [2.3] * 40).severity == "warning"
    assert "Every input is 0" in fed(same, [2.3] * 40).cause
    assert fed(same, list(np.linspace(2.3, 0.1, 40))).severity == "info"


def batches(key, values, *others):
    sites = {key: values, "loss:scalar": list(np.linspace(2.3, 0.1, 40))} | dict.fromkeys(others, values)
    return asked(constant_feature, patient(sites, shapes={key: (8, 10)}))


def test_batches_of_one_number_are_a_warning_even_if_the_loss_falls_unless_there_is_another_input():
    same = [np.zeros((8, 10))] * 40
    assert batches("(model):input[0]", same).severity == "warning"
    assert batches("(model):input[0]", same, "(model):input[1]").severity == "info"


def test_inputs_of_zeros_and_ones_are_not_one_number():
    pixels = [np.eye(10)[:8]] * 39 + [np.zeros((8, 10))]
    assert fed(pixels, [2.3] * 40) is None
    assert fed([np.zeros((8, 10))] * 5, [2.3] * 5) is None


def alike(repeated, marks):
    x = np.random.default_rng(0).normal(size=(16, 10))
    sites = {
        "(model):input[0]": [x] * 6,
        "(model):vital.repeated_rows": repeated,
        "(model):vital.batch_mark": marks,
    }
    return asked(constant_feature, patient(sites, shapes={"(model):input[0]": (16, 10)}))


def test_batches_of_one_sample_are_found():
    assert "All 16 samples" in alike([15 / 16] * 6, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).cause
    assert alike([14 / 16] * 6, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) is None
    assert alike([15 / 16] * 5 + [0.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) is None
    assert alike([15 / 16] * 6, [1.0] * 6) is None, "a constant that is learnt from, as in StyleGAN"
