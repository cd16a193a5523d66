"""Robust numbers against their definitions, written out in loops."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest

from sonde.core.robust import MAD_TO_STD, mad, slope, theil_sen


@pytest.fixture
def noisy():
    return np.random.default_rng(0).standard_normal(41)


def test_the_deviation_is_that_of_a_normal_distribution_and_one_outlier_does_not_move_it(noisy):
    middle = statistics.median(noisy)
    assert mad(noisy) == pytest.approx(1.4826 * statistics.median(abs(value - middle) for value in noisy))
    assert mad(np.random.default_rng(1).standard_normal(100_000)) == pytest.approx(1.0, abs=0.02)
    spoilt = noisy.copy()
    spoilt[3] = 1e9
    assert mad(spoilt) < 2 * mad(noisy)


def test_what_is_not_finite_has_no_say(noisy):
    assert mad(np.append(noisy, [np.nan, np.inf])) == mad(noisy)
    assert math.isnan(mad(np.array([np.nan])))
    assert mad(np.array([3.0, 4.0, 5.0]), about=0.0) == 4 * MAD_TO_STD


def test_the_slope_is_the_median_over_all_pairs(noisy):
    steps = np.cumsum(np.arange(1, 42))
    pairs = itertools.combinations(zip(steps.tolist(), noisy.tolist(), strict=True), 2)
    assert slope(steps, noisy) == pytest.approx(statistics.median((y - b) / (x - a) for (a, b), (x, y) in pairs))


def test_the_bounds_of_a_slope_hold_the_true_one_and_exclude_none_for_pure_noise(noisy):
    steps = np.arange(41)
    rising = theil_sen(steps, 0.5 * steps + noisy)
    assert 0 < rising.low < 0.5 < rising.high
    flat = theil_sen(steps, noisy)
    assert flat.low < 0 < flat.high


def test_readings_of_one_step_have_no_slope_and_huge_ones_have():
    assert math.isnan(slope(np.array([3, 3]), np.array([1.0, 2.0])))
    assert slope(np.arange(5), 1e307 * np.arange(5)) == pytest.approx(1e307)
