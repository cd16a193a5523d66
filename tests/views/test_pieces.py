"""Golden text of the small pieces: what a person sees at 80 columns, with and without unicode."""

import io
from textwrap import dedent

import numpy as np
import pytest
from rich.color import Color
from rich.console import Console

from sonde.analysis import FlowRow, Mark
from sonde.core import schema
from sonde.records import Event
from sonde.views.terminal import (
    Curve,
    HeatMap,
    Look,
    PlotOptions,
    bar,
    event_level,
    event_line,
    event_table,
    flow_bars,
    heat_map,
    histogram_plot,
    line_plot,
    sparkline,
)

PRETTY, PLAIN = Look(40, colour=False), Look(40, unicode=False, colour=False)
CROSS = "\N{MULTIPLICATION SIGN}"


def golden(text):
    return dedent(text).strip("\n")


def test_a_plot_has_round_ticks_a_gap_and_a_mark(draw):
    steps = np.arange(101)
    values = 2.0 * np.exp(-steps / 40)
    values[45:60] = np.nan
    plot = line_plot([Curve(steps, values)], PRETTY, PlotOptions(height=5, marks=[50]))
    assert draw(plot) == golden(
        """
        2 ┤⠑⠢⣄
          │   ⠙⠲⠤⡀
        1 ┤      ⠈⠉⠒⠦⢄⣀
          │            ⠉⠉⠒⠲⠄
          │                      ⠉⠑⠒⠒⠒⠢⠤⠤⠤⠤⠤⣀⣀⣀⣀
          └┴─────────────────▲─────────────────┴
           0                50               100
        """
    )


def test_the_same_plot_in_ascii(draw):
    steps = np.arange(101)
    values = 2.0 * np.exp(-steps / 40)
    values[45:60] = np.nan
    plot = line_plot([Curve(steps, values)], PLAIN, PlotOptions(height=5, marks=[50]))
    assert draw(plot).splitlines() == [
        "2 +'\"-",
        "  |   '\"-.",
        "1 +      ''\"\"-.",
        "  |            ''\"\"-",
        '  |                      \'\'""""-----....',
        "  ++-----------------^-----------------+",
        "   0                50               100",
    ]


def test_a_logarithmic_plot_is_straight_for_a_decay(draw):
    steps = np.arange(100)
    plot = draw(line_plot([Curve(steps, 10.0 ** (-steps / 20))], PLAIN, PlotOptions(height=6, log=True)))
    assert "1e-4" in plot
    assert "1e0" in plot
    assert plot.isascii()


def test_a_plot_of_nothing_is_an_empty_frame(draw):
    assert "┤" in draw(line_plot([], PRETTY))
    assert "┤" in draw(line_plot([Curve(np.arange(3), np.full(3, np.nan))], PRETTY))
    assert draw(line_plot([Curve(np.array([7]), np.array([1.0]))], PRETTY))


def test_several_curves_get_a_legend(draw):
    steps = np.arange(10)
    curves = [Curve(steps, steps * 1.0, "train"), Curve(steps, steps * 2.0, "eval", "red")]
    assert draw(line_plot(curves, PRETTY)).splitlines()[-1].split() == ["──", "train", "──", "eval"]


def test_a_sparkline_rises_breaks_and_crosses():
    values = np.array([1.0, 2.0, 3.0, np.nan, 5.0, np.inf, 8.0])
    assert sparkline(values, PRETTY).plain == f"▁▂▃ ▅{CROSS}█"
    assert sparkline(values, PLAIN).plain == "_.- +x@"
    bad = np.array([True, *[False] * 6])
    assert sparkline(values, PRETTY, bad=bad).plain[0] == CROSS


def test_small_noise_stays_level_and_a_zero_is_the_smallest():
    noise = 1.0 + 0.001 * np.sin(np.arange(8))
    assert set(sparkline(noise, PRETTY).plain) <= set("▄▅")
    assert sparkline(np.array([0.0, 1e-3, 1e-3]), PRETTY, log=True).plain == "▁██"
    assert sparkline(np.full(3, np.nan), PRETTY).plain == "   "
    assert sparkline(np.zeros(0), PRETTY).plain == ""


@pytest.mark.parametrize(("share", "expected"), [(0.0, "    "), (0.5, "━━  "), (0.6, "━━╸ "), (9.0, "━━━━")])
def test_a_bar_fills_its_share(share, expected):
    assert bar(share, 4, PRETTY).plain == expected
    assert bar(float("nan"), 4, PRETTY).plain == "    "


def test_a_histogram_of_magnitudes(draw):
    bins = np.zeros(schema.NUM_BINS, dtype=np.uint64)
    bins[schema.ONE_BIN - 3 : schema.ONE_BIN + 2] = [1, 4, 8, 4, 1]
    assert draw(histogram_plot(bins, PRETTY, height=3)).splitlines() == [
        "  44% ┤            ██",
        "      │          ▄▄██▄▄",
        "      │        ▃▃██████▃▃",
        "      └────────────────────────",
        "             2⁻⁴     2⁰      2⁴  |x|",
    ]
    assert draw(histogram_plot(bins, PLAIN)).isascii()
    assert "no finite" in draw(histogram_plot(np.zeros(64, dtype=np.uint64), PRETTY))


def test_a_histogram_at_either_end_of_the_bins_is_drawn(draw):
    for place in (0, schema.NUM_BINS - 1):
        bins = np.zeros(schema.NUM_BINS, dtype=np.uint64)
        bins[place] = 5
        assert "100%" in draw(histogram_plot(bins, PRETTY))


def test_a_heat_map_without_colours_is_drawn_in_shades(draw):
    values = np.array([[1.0, 10.0, 100.0], [np.nan, 1.0, 0.0]])
    bad = np.array([[False, False, False], [False, True, False]])
    data = HeatMap(values, ["first", "a.very.long.name.of.a.layer"], "step 0", "9", bad=bad)
    assert draw(heat_map(data, PRETTY)) == golden(
        f"""
        first         ·▒█
        …e.of.a.layer  {CROSS}·
                      step 0 9
                      1.00 ···░░▒▒▓▓███ 100
        """
    )
    assert draw(heat_map(data, PLAIN)) == golden(
        """
        first         .+@
        ~e.of.a.layer  x.
                      step 0 9
                      1.00 ..:-=++*#%@@ 100
        """
    )


def test_many_rows_become_half_blocks_in_colour():
    look = Look(60)
    data = HeatMap(np.random.default_rng(0).uniform(1, 2, (40, 10)), [f"layer.{i}" for i in range(40)])
    console = Console(file=io.StringIO(), width=60, color_system="truecolor", force_terminal=True)
    console.print(heat_map(data, look))
    text = console.file.getvalue()
    assert text.count("▀") == 20 * 10
    assert "\x1b[38;2;" in text
    assert "48;2;" in text


def test_256_colours_are_used_where_there_are_no_more(monkeypatch):
    # rich remembers the codes of a style, whatever the console, so this must be a colour that no other test draws.
    monkeypatch.setattr("sonde.views.terminal.heatmap.ramp", lambda share: Color.from_rgb(17, 34, 51))
    console = Console(file=io.StringIO(), width=60, color_system="256", force_terminal=True)
    console.print(heat_map(HeatMap(np.array([[1.0, 2.0]]), ["a"]), Look.of(console)))
    assert "\x1b[38;5;" in console.file.getvalue()


def test_a_heat_map_of_nothing_says_so(draw):
    assert "nothing to draw" in draw(heat_map(HeatMap(np.full((1, 3), np.nan), ["a"]), PRETTY))
    assert draw(heat_map(HeatMap(np.ones((1, 3)), ["a"]), PRETTY))


def test_gradient_flow_bars_are_logarithmic_and_long_models_are_thinned(draw):
    flow = [FlowRow(f"layer.{i}", "Linear", 10.0**-i, 1e-3, Mark()) for i in range(3)]
    text = draw(flow_bars(flow, Look(60)))
    lengths = [line.count("━") for line in text.splitlines()[1:4]]
    assert lengths[0] - lengths[1] == pytest.approx(lengths[1] - lengths[2], abs=1)
    many = [FlowRow(f"layer.{i}", "", 1.0, float("nan"), Mark()) for i in range(99)]
    many[50] = FlowRow("layer.50", "", 1.0, 1.0, Mark("bad", 1.0, "non-finite"))
    text = draw(flow_bars(many, Look(80)))
    assert "layer.50" in text
    assert "25 of 99 layers" in text


def event(event_type, message="", step=3):
    return Event(event_type=event_type, message=message, step=step, timestamp=0.0)


@pytest.mark.parametrize(
    ("event_type", "level"),
    [("exception", "bad"), ("nonfinite", "bad"), ("fault", "bad"), ("dropped", "odd"), ("epoch", "fine")],
)
def test_an_event_matters_by_its_type(event_type, level):
    assert event_level(event(event_type)) == level


def test_of_many_events_those_that_matter_are_reported(draw):
    events = [event("epoch", f"epoch {i}", i) for i in range(50)]
    events[7] = event("exception", "it broke\nhere\x1b[31m", 7)
    text = draw(event_table(events, most=3))
    assert "it broke here" in text
    assert "\x1b" not in text
    assert "and 47 events more" in text
    assert draw(event_line(events[7])) == "step 7  exception  it broke here\\x1b[31m"
