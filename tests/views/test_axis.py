import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sonde.views.terminal.plot import Axis, linear_ticks, log_ticks, tick_labels


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(2, 12))
def test_linear_ticks_are_inside_even_and_not_too_many(low, span, most):
    assume(span > 1e-6 * abs(low))  # finer than that there are no numbers to be round
    ticks = linear_ticks(low, low + span, most)
    assert len(ticks) <= most
    assert all(low - span * 1e-4 <= tick <= low + span * (1 + 1e-4) for tick in ticks)
    if len(ticks) > 2:
        assert np.ptp(np.diff(ticks)) <= 1e-4 * span


def test_ticks_are_round():
    assert linear_ticks(0.13, 2.53, 6) == [0.5, 1.0, 1.5, 2.0, 2.5]
    assert linear_ticks(-3.0, 3.0, 4) == [-2.0, 0.0, 2.0]
    assert log_ticks(1e-8, 1e-2, 4) == [1e-8, 1e-6, 1e-4, 1e-2]
    assert log_ticks(0.15, 0.9, 4) == [0.2, 0.5]
    assert log_ticks(0.91, 0.99, 4) == linear_ticks(0.91, 0.99, 4)


def test_labels_have_the_digits_that_tell_them_apart():
    assert tick_labels([0.0, 100.0, 1000.0]) == ["0", "100", "1,000"]
    assert tick_labels([0.25, 0.5]) == ["0.25", "0.50"]
    assert tick_labels([0.0, 2e6]) == ["0", "2e6"]
    assert tick_labels([]) == []


def test_a_value_has_its_place_and_what_is_not_finite_has_none():
    axis = Axis.around(np.array([1.0, np.nan, 100.0, np.inf]), log=True)
    assert axis.place(np.array([1.0, 10.0, 100.0])) == pytest.approx([0.0, 0.5, 1.0])
    assert np.isnan(axis.place(np.array([np.nan, -1.0, 0.0, np.inf]))).all()


def test_a_logarithmic_axis_needs_something_positive():
    assert not Axis.around(np.array([-1.0, 0.0]), log=True).log


@pytest.mark.parametrize("values", [[], [np.nan], [5.0], [0.0, 0.0], [-2.0]])
def test_an_axis_around_little_is_still_an_axis(values):
    axis = Axis.around(np.array(values))
    assert axis.low < axis.high
    assert linear_ticks(axis.low, axis.high, 5)
