from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from handmade import found, loss, patient
from programs import data, kinds, perceptron, train

from sonde.core.facts import Facts
from sonde.diagnosis.outlook import chance_loss


@pytest.mark.parametrize(("weight", "ill"), [(1.0, True), (30.0, False)])
def test_a_model_that_always_answers_the_same_is_found(tmp_path, weight, ill):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 8, generator=generator)
    y = (x[:, 0] > 1.85).long()
    model = perceptron(classes=2)
    weights = torch.tensor([1.0, weight])

    def loss_fn(out, target):
        return F.cross_entropy(out, target, weight=weights)

    found = train(
        tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.02), x, y, steps=150, size=64, loss_fn=loss_fn
    )
    assert ("class_imbalance_collapse" in kinds(found)) is ill


def test_a_detector_that_never_says_yes_is_found(tmp_path):
    model = perceptron(classes=1)
    x, _ = data()
    y = (torch.arange(len(x)) % 25 == 0).float()
    found = train(
        tmp_path,
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        x,
        y,
        steps=100,
        loss_fn=lambda out, yes: F.binary_cross_entropy_with_logits(out.squeeze(1), yes),
    )
    assert "class_imbalance_collapse" in kinds(found)


@pytest.mark.parametrize(("weighted", "severity"), [(True, "warning"), (False, "info")])
def test_weights_that_do_not_make_up_for_rarity_are_worth_a_warning(weighted, severity):
    readings = {
        "loss:scalar": [0.05] * 80,
        "loss_fn:vital.running_label_entropy": [0.28] * 80,
        "loss_fn:vital.predicted_entropy": [0.0] * 80,
    }
    facts = Facts(losses=(loss("cross_entropy", target_shape=(64,), settings={"weighted": weighted}),))
    assert found("class_imbalance_collapse", patient(readings, facts)).severity == severity


@pytest.mark.parametrize(("weighted", "guess"), [(True, math.log(2)), (False, 0.28)])
def test_a_guess_under_a_weighted_loss_gains_nothing_from_frequencies(weighted, guess):
    readings = {"loss:scalar": [0.3] * 10, "loss_fn:vital.running_label_entropy": [0.28] * 10}
    about = loss("cross_entropy", target_shape=(64,), classes=2, settings={"weighted": weighted})
    assert chance_loss(patient(readings, Facts(losses=(about,)))) == pytest.approx(guess)
