import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sonde.analysis import describe, slope, smooth


@given(st.floats(-100, 100), st.integers(1, 80), st.integers(1, 59))
def test_a_smoothed_curve_knows_nothing_of_what_comes_later(jump, window, at):
    calm = np.sin(np.arange(60.0))
    spiked = calm.copy()
    spiked[at] += jump
    assert np.array_equal(smooth(spiked, window)[:at], smooth(calm, window)[:at])


def test_smoothing_averages_what_came_before_and_zero_is_raw():
    noisy = 2.0 + np.random.default_rng(0).normal(0, 0.5, 400)
    assert np.array_equal(smooth(noisy, 0), noisy)
    smoothed = smooth(noisy, 20)
    assert smoothed[0] == noisy[0]
    assert np.std(smoothed[100:]) < np.std(noisy) / 4
    assert smooth(np.full(9, 3.0), 5) == pytest.approx(np.full(9, 3.0))


def test_gaps_stay_gaps_and_a_curve_ends_where_it_ended():
    values = np.linspace(1.0, 0.5, 100)
    values[20], values[99] = np.nan, np.inf
    smoothed = smooth(values, 10)
    assert np.flatnonzero(np.isnan(smoothed)).tolist() == [20, 99]


@pytest.mark.parametrize("values", [[], [1.0], [1.0, np.nan], [np.nan, np.nan, np.nan]])
def test_too_few_values_are_given_back_as_they_are(values):
    assert np.array_equal(smooth(np.array(values), 5), np.array(values), equal_nan=True)


def test_the_slope_ignores_outliers():
    steps = np.arange(0, 1000, 10)
    values = 3.0 - 0.002 * steps
    values[[3, 40, 77]] = 1e6
    assert slope(steps, values) == pytest.approx(-0.002, rel=1e-3)
    assert np.isnan(slope(steps[:1], values[:1]))


def test_a_curve_is_described():
    steps = np.arange(10, 110)
    values = np.linspace(2.0, 1.0, 100)
    values[30] = 0.25
    trend = describe(steps, values)
    assert (trend.first, trend.last, trend.lowest, trend.lowest_step) == (2.0, 1.0, 0.25, 40)
    assert trend.direction == "falling"
    assert describe(steps, -values).direction == "rising"
    assert describe(steps, 5 + 1e-4 * np.sin(steps)).direction == "flat"


def test_a_curve_that_ends_without_a_number_is_broken():
    values = np.array([2.0, 1.0, np.nan])
    assert describe(np.arange(3), values).direction == "broken"
    assert describe(np.arange(3), np.full(3, np.nan)).lowest_step is None
