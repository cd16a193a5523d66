import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sonde.analysis import any_in_columns, column_edges, columns, thin

curves = hnp.arrays(np.float64, st.integers(0, 400), elements=st.floats(-1e6, 1e6) | st.just(float("nan")))


@given(curves, st.integers(5, 100))
def test_thinning_keeps_the_extremes_and_the_gaps(values, points):
    steps = np.arange(len(values))
    kept_steps, kept = thin(steps, values, points)
    assert len(kept) <= max(points, 5)
    assert (np.diff(kept_steps) > 0).all()
    assert np.array_equal(kept, values[kept_steps], equal_nan=True)
    if np.isfinite(values).any():
        assert np.nanmin(kept) == np.nanmin(values)
        assert np.nanmax(kept) == np.nanmax(values)
    assert np.isnan(kept).any() == np.isnan(values).any()


def test_a_curve_stays_broken_where_it_was_broken():
    values = np.ones(1000)
    values[500] = np.nan
    _, kept = thin(np.arange(1000), values, 50)
    gap = int(np.flatnonzero(np.isnan(kept))[0])
    assert np.isfinite(kept[gap - 1])
    assert np.isfinite(kept[gap + 1])


def test_columns_hold_the_median_and_know_what_is_absent():
    steps = np.array([0, 1, 2, 3, 10, 11])
    values = np.array([1.0, 3.0, np.nan, 5.0, 7.0, np.inf])
    edges = column_edges(0, 11, 3)
    assert columns(steps, values, edges).tolist()[::2] == [3.0, 7.0]
    assert np.isnan(columns(steps, values, edges)[1])
    assert any_in_columns(steps, ~np.isfinite(values), edges).tolist() == [True, False, True]


def test_columns_are_never_narrower_than_a_step():
    assert len(column_edges(5, 7, 80)) - 1 == 3
    assert len(column_edges(5, 5, 80)) - 1 == 1
