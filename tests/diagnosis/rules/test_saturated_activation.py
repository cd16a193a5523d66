from __future__ import annotations

from patients import asked, patient

from sonde.core.facts import Facts
from sonde.diagnosis.rules.activations import saturated_activation


def run(share, losses, order=("fc", "act", "head"), growing=False):
    looks = [[1.0] * int(100 * share) + [0.0] * (100 - int(100 * share))] * len(losses)
    if growing:
        looks[:10] = [[0.0] * 100] * 10
    facts = Facts(order=order, edges=(("fc", "act"),))
    return asked(saturated_activation, patient({"act:vital.saturated": looks, "loss:scalar": losses}, facts))


FLAT, FALLING = [2.3] * 60, [2.3 - 0.03 * step for step in range(60)]


def test_layers_in_their_flat_ends_are_found():
    assert run(0.7, FLAT).severity == "warning"
    assert run(0.7, FLAT).sites == ("fc", "act")
    assert run(0.9, FALLING).severity == "warning"


def test_a_layer_that_became_sure_while_learning_is_a_note_and_the_last_one_may_be():
    assert run(0.9, FALLING, growing=True).severity == "info"
    assert run(0.3, FLAT) is None
    assert run(0.9, FLAT, order=("fc", "act")) is None
