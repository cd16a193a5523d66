"""Golden curves: shapes that people know by sight, twenty seeds each, with noise."""

from __future__ import annotations

import numpy as np
import pytest

from sonde.diagnosis.dynamics import classify, judge_fit

N = 160
X = np.arange(N) / N
SEEDS = 20


def noisy(curve, rng, amount):
    return curve * (1 + amount * rng.standard_normal(len(curve)))


SHAPES = {
    "falling exponential": ("converging", lambda rng: noisy(2.3 * np.exp(-1.5 * X), rng, 0.03)),
    "falling line": ("converging", lambda rng: noisy(3.0 - 2.0 * X, rng, 0.05)),
    "power law": ("converging", lambda rng: noisy(4.0 * (1 + 20 * X) ** -0.6, rng, 0.03)),
    "falling with spikes": (
        "converging",
        lambda rng: noisy(2.0 * np.exp(-2 * X), rng, 0.03) * np.where(rng.random(N) < 0.04, 4.0, 1.0),
    ),
    "late drop still falling": (
        "converging",
        lambda rng: noisy(np.where(X < 0.5, 2.3, 2.3 * np.exp(-3 * (X - 0.5))), rng, 0.03),
    ),
    "fell and settled": ("converged", lambda rng: noisy(0.2 + 2.0 * np.exp(-18 * X), rng, 0.05)),
    "fell in a step and settled": ("converged", lambda rng: noisy(np.where(X < 0.3, 2.3, 0.6), rng, 0.05)),
    "flat from the start": ("plateau", lambda rng: noisy(np.full(N, 2.303), rng, 0.02)),
    "flat and very noisy": ("plateau", lambda rng: noisy(np.full(N, 1.0), rng, 0.25)),
    "constant": ("plateau", lambda rng: np.full(N, 0.693)),
    "sine around a level": (
        "oscillating",
        lambda rng: noisy(1.0 + 0.4 * np.sin(2 * np.pi * X * 12 + rng.random() * 6), rng, 0.04),
    ),
    "jumping up and down each step": (
        "oscillating",
        lambda rng: noisy(1.0 + 0.3 * np.where(np.arange(N) % 2, 1, -1), rng, 0.05),
    ),
    "rising exponential": ("diverging", lambda rng: noisy(0.5 * np.exp(3 * X), rng, 0.05)),
    "fell, then rose": (
        "diverging",
        lambda rng: noisy(2 * np.exp(-6 * X) + 0.2 + np.maximum(0, X - 0.6) * 8, rng, 0.05),
    ),
    "ended in NaN": ("non-finite", lambda rng: np.r_[noisy(2 * np.exp(-X), rng, 0.03)[:-3], [np.nan] * 3]),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_known_shape_is_called_by_its_name(shape):
    expected, make = SHAPES[shape]
    states = [classify(make(np.random.default_rng(seed))).state for seed in range(SEEDS)]
    right = sum(state == expected for state in states)
    assert right >= 19, f"{right} of {SEEDS}: {states}"


def test_over_all_shapes_at_least_99_of_100_are_right(capsys):
    right = sum(
        classify(make(np.random.default_rng(seed))).state == expected
        for expected, make in SHAPES.values()
        for seed in range(SEEDS)
    )
    total = len(SHAPES) * SEEDS
    with capsys.disabled():
        print(f" [dynamics: {right} of {total} golden curves right]", end="")
    assert right >= 0.99 * total


@pytest.mark.parametrize("length", [12, 20, 40, 1000])
def test_the_length_of_a_clear_curve_does_not_matter(length):
    x = np.arange(length) / length
    rng = np.random.default_rng(0)
    assert classify(noisy(2 * np.exp(-2 * x), rng, 0.01)).state == "converging"
    assert classify(noisy(np.exp(2 * x), rng, 0.01)).state == "diverging"


def test_a_falling_loss_is_converging_and_a_rising_one_diverging_never_the_other_way():
    down = np.linspace(2.0, 1.0, 50)
    assert (classify(down).state, classify(down[::-1]).state) == ("converging", "diverging")


def test_too_few_points_are_unknown():
    assert classify(np.ones(5)).state == "unknown"


def test_scatter_decides_stability():
    rng = np.random.default_rng(0)
    assert classify(noisy(np.full(N, 1.0), rng, 0.02)).stability == "stable"
    assert classify(noisy(np.full(N, 1.0), rng, 0.3)).stability == "high_variance"
    assert classify(noisy(np.full(N, 1.0), rng, 0.9)).stability == "unstable"


@pytest.mark.parametrize("seed", range(10))
def test_overfitting_needs_a_validation_that_rises_while_training_falls(seed):
    rng = np.random.default_rng(seed)
    epochs = np.arange(20)
    train = noisy(2 * np.exp(-epochs / 6), rng, 0.02)
    rising = noisy(0.6 + np.abs(epochs - 8) * 0.05, rng, 0.02)
    falling = noisy(0.3 + 1.8 * np.exp(-epochs / 6), rng, 0.02)
    assert judge_fit(train, rising) == "overfitting"
    assert judge_fit(train, falling) == "good"
    assert judge_fit(noisy(np.full(20, 2.3), rng, 0.01), noisy(np.full(20, 2.3), rng, 0.01)) == "underfitting"
    assert judge_fit(train[:2], falling[:2]) == "unknown"
