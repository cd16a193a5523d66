"""Drawings in a terminal take any float64: the largest, the smallest, infinities, NaN, and one value alone."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from sonde.analysis import FlowRow, Mark, describe, smooth
from sonde.debug import TerminalVisualizer
from sonde.views.terminal import Look, make_console
from sonde.views.terminal.bars import bar, picture, sparkline
from sonde.views.terminal.heatmap import HeatMap, heat_map
from sonde.views.terminal.plot import Axis, Curve, PlotOptions, line_plot, linear_ticks, log_ticks
from sonde.views.terminal.style import short
from sonde.views.terminal.tables import flow_bars

LARGEST, SMALLEST = sys.float_info.max, 5e-324
EXTREMES = (LARGEST, -LARGEST, 1e308, -1e308, SMALLEST, -SMALLEST, sys.float_info.min, 0.0, -0.0, 1.0,
            np.nextafter(1.0, 2.0), 1e-300, np.inf, -np.inf, np.nan)  # fmt: skip
ANY = st.one_of(st.sampled_from(EXTREMES), st.floats())
CURVES = arrays.arrays(np.float64, st.integers(1, 12), elements=ANY)
GRIDS = arrays.arrays(np.float64, st.tuples(st.integers(1, 3), st.integers(1, 6)), elements=ANY)
LOOKS = (Look(60, True, True), Look(60, False, False))
FULL_RANGE = np.array([-LARGEST, LARGEST])


def printed(*parts):
    file = io.StringIO()
    console = make_console(file=file, width=60)
    for part in parts:
        console.print(part)
    text = file.getvalue()
    assert text
    return text


@given(CURVES, st.booleans())
@example(FULL_RANGE, False)
@example(np.array([1e308, -1e308, 1e308]), False)
@example(np.array([SMALLEST]), True)
@example(np.array([SMALLEST, 1e-323]), False)
@example(np.array([SMALLEST, LARGEST]), True)
@example(np.array([LARGEST]), False)
@example(np.array([LARGEST]), True)
def test_a_line_plot_takes_any_values(values, log):
    for look in LOOKS:
        printed(line_plot([Curve(np.arange(len(values)), values)], look, PlotOptions(log=log)))
    TerminalVisualizer(60, 12, mode="ascii", colours="none").ascii_line_plot(values, log=log)
    TerminalVisualizer(60, 12, mode="ascii", colours="none").ascii_line_plot(values, values)


@given(CURVES, st.booleans())
@example(FULL_RANGE, False)
@example(np.array([SMALLEST]), True)
@example(np.array([LARGEST, LARGEST]), True)
def test_every_finite_value_has_its_place_on_the_axis_around_it_and_ticks_are_on_it(values, log):
    axis = Axis.around(values, log=log)
    assert axis.low < axis.high
    assert np.isfinite([axis.low, axis.high]).all()
    drawable = np.isfinite(values) & (values > 0) if axis.log else np.isfinite(values)
    places = axis.place(values)
    assert (np.isfinite(places) == drawable).all()
    assert ((places[drawable] >= -1e-9) & (places[drawable] <= 1 + 1e-9)).all()
    order = np.argsort(values[drawable])
    assert (np.diff(places[drawable][order]) >= 0).all()
    ticks = np.array(axis.ticks(5))
    assert len(ticks) <= 5
    assert np.isfinite(ticks).all()


def test_the_whole_range_of_numbers_has_its_zero_in_the_middle():
    axis = Axis.around(FULL_RANGE)
    assert axis.place(np.array([-LARGEST, 0.0, LARGEST])).tolist() == [0.0, 0.5, 1.0]
    assert linear_ticks(-LARGEST, LARGEST, 5) == [-1e308, 0.0, 1e308]
    assert log_ticks(SMALLEST, LARGEST, 8) == pytest.approx([10.0**power for power in range(-316, 309, 79)])


@given(GRIDS, st.booleans())
@example(FULL_RANGE[None], False)
@example(FULL_RANGE[None], True)
def test_heat_maps_and_pictures_take_any_values(values, log):
    for look in LOOKS:
        printed(heat_map(HeatMap(values, [str(row) for row in range(len(values))], log=log), look))
        printed(picture(values, look))
    TerminalVisualizer(60, 12, mode="ascii", colours="none").heat_map(values, log=log)


@given(CURVES, st.booleans())
@example(FULL_RANGE, False)
@example(np.array([1e308, -1e308, 1e308]), False)
def test_sparklines_bars_and_numbers_take_any_values(values, log):
    for look in LOOKS:
        assert len(sparkline(values, look, log=log).plain) == len(values)
        for value in values.tolist():
            assert len(bar(value, 10, look).plain) == 10
            assert short(value)
    TerminalVisualizer(60, 12, mode="ascii", colours="none").sparkline(values, width=20)


@given(CURVES, st.integers(1, 12))
@example(FULL_RANGE, 3)
@example(np.array([SMALLEST]), 4)
@example(np.array([LARGEST, LARGEST]), 4)
def test_a_histogram_counts_any_values(values, bins):
    drawn = TerminalVisualizer(60, 12, mode="ascii", colours="none").ascii_histogram(values, bins=bins)
    known = int(np.isfinite(values).sum())
    counted = [int(line.split()[-1]) for line in drawn.splitlines() if "|" in line]
    assert sum(counted) == known


@given(CURVES)
@example(FULL_RANGE)
@example(np.array([SMALLEST, LARGEST]))
@example(np.array([LARGEST] * 3))
def test_gradient_flow_takes_any_values(values):
    rows = [FlowRow(f"layer {i}", "Linear", value, value, Mark()) for i, value in enumerate(values.tolist())]
    for look in LOOKS:
        printed(flow_bars(rows, look))


@given(CURVES)
@example(FULL_RANGE)
@example(np.array([1e308, -1e308, 1e308, -1e308]))
@example(np.array([SMALLEST, SMALLEST, SMALLEST]))
def test_a_trend_can_be_computed_of_any_values(values):
    trend = describe(np.arange(len(values)), values)
    known = values[np.isfinite(values)]
    if len(known):
        assert (trend.lowest, trend.highest) == (known.min(), known.max())
    fitted = smooth(values, 2)
    assert (np.isfinite(fitted) == np.isfinite(values)).all()


@pytest.mark.parametrize("exponent", [-900, 900])
def test_a_trend_does_not_depend_on_the_unit(exponent):
    steps = np.arange(40)
    values = 2.0 - steps / 40 + np.random.default_rng(0).normal(size=40) * 0.01
    plain, scaled = (describe(steps, each) for each in (values, np.ldexp(values, exponent)))
    assert scaled.direction == plain.direction == "falling"
    assert np.ldexp(scaled.slope, -exponent) == plain.slope
    assert (np.ldexp(smooth(np.ldexp(values, exponent), 4), -exponent) == smooth(values, 4)).all()
