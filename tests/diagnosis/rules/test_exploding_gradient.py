from __future__ import annotations

import pytest
from patients import asked, patient

from sonde.diagnosis.rules.gradients import exploding_gradient

FLAT, FALLING = [2.3] * 60, [2.3 - 0.03 * step for step in range(60)]


def run(norms, losses):
    sites = {"a.weight:gradient": [[norm] * 4 for norm in norms], "a.weight:parameter": [[1.0] * 4] * len(norms)}
    shapes = {"a.weight:gradient": (2, 2), "a.weight:parameter": (2, 2)}
    return asked(exploding_gradient, patient(sites | {"loss:scalar": losses}, shapes=shapes))


@pytest.mark.parametrize(
    "norms",
    [[1.0] * 50 + [500.0, 1.0] * 5, [2.0 ** min(9, step - 50) if step > 50 else 1.0 for step in range(60)], [1e5] * 60],
)
def test_leaps_doublings_and_sheer_size_are_found(norms):
    assert run(norms[:60], FLAT).sites == ("a.weight",)
    assert run(norms[:60], FLAT).severity == "warning"
    assert run(norms[:60], FALLING).severity == "info"


def test_one_odd_batch_is_not():
    assert run([1.0] * 40 + [500.0] + [1.0] * 19, FLAT) is None


def test_gradients_that_fall_are_a_descent():
    assert run([10.0 ** (6 - step / 6) for step in range(60)], FLAT) is None
    assert run([1e8] * 4 + [1.0] * 56, FLAT) is None
