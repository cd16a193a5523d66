import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sonde.analysis import describe, slope, smooth


@given(st.floats(-100, 100), st.floats(-1000, 1000), st.integers(1, 80))
def test_smoothing_reproduces_a_straight_line_to_its_ends(rate, start, window):
    line = start + rate * np.arange(60.0)
    assert smooth(line, window) == pytest.approx(line, abs=1e-6)


def test_smoothing_does_not_sag_at_the_end_of_a_decay():
    x = np.arange(200.0)
    decay = 2.5 * np.exp(-x / 60)
    noisy = decay + np.random.default_rng(0).normal(0, 0.05, 200)
    smoothed = smooth(noisy, 20)
    moving_average = np.convolve(noisy, np.ones(41) / 41, "same")
    assert abs(smoothed[0] - decay[0]) < 0.1 < abs(moving_average[0] - decay[0])
    assert np.abs(smoothed - decay).mean() < np.abs(noisy - decay).mean() / 2


def test_one_spike_does_not_bend_the_curve_and_gaps_stay():
    values = np.linspace(1.0, 0.5, 100) + np.random.default_rng(1).normal(0, 0.01, 100)
    spiked = values.copy()
    spiked[-1], spiked[50], spiked[20] = 100.0, -100.0, np.nan
    smoothed = smooth(spiked, 10)
    assert np.isnan(smoothed[20])
    assert np.isnan(smoothed).sum() == 1
    assert np.nanmax(np.abs(smoothed - smooth(values, 10))) < 0.05


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
