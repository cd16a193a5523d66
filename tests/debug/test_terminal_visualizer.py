"""TerminalVisualizer: what is drawn is what was given, in whatever signs the terminal has."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sonde.debug import TerminalVisualizer
from sonde.errors import OptionError


def plain(mode="ascii", width=80, height=24):
    return TerminalVisualizer(width, height, mode=mode, colours="none")


def test_the_seeds_example_runs_as_it_stands(capsys):
    terminal_viz = TerminalVisualizer(80, 24)
    print(terminal_viz.ascii_histogram([1.0, 2.0, 1.5, 3.0], 10))
    print(terminal_viz.ascii_line_plot([0, 1, 2, 3], [3.0, 2.0, 1.0, 0.5], "Training Loss"))
    out = capsys.readouterr().out
    assert "Training Loss" in out
    assert "\x1b" not in out  # captured output is no terminal


def test_a_histogram_counts_as_numpy_does():
    values = np.random.default_rng(0).normal(size=1000)
    counts, _ = np.histogram(values, bins=12)
    lines = plain().ascii_histogram([*values, np.nan], 12).splitlines()
    assert [int(line.split()[-1]) for line in lines[:12]] == counts.tolist()
    lengths = [line.count("#") for line in lines[:12]]
    assert np.corrcoef(lengths, counts)[0, 1] > 0.999
    assert lines[-1] == "1 NaN or infinite left out"


def test_a_line_plot_falls_where_the_values_fall():
    lines = plain(width=60, height=12).ascii_line_plot(range(100), np.linspace(5, 1, 100), "loss").splitlines()
    assert lines[0] == "loss"
    drawn = [line[4:] for line in lines[1:-2]]
    columns = [re.search(r"[^ |+]", line).start() for line in drawn if re.search(r"[^ |+]", line[1:])]
    assert columns == sorted(columns)
    assert len(lines) <= 12


@pytest.mark.parametrize("mode", ["braille", "blocks", "ascii"])
def test_every_mode_draws_in_its_own_signs(mode):
    values = np.sin(np.linspace(0, 6, 300))
    text = plain(mode).ascii_line_plot(values)
    braille = any(0x2800 < ord(sign) < 0x2900 for sign in text)
    blocks = any(sign in "▘▝▀▖▌▞▛▗▚▐▜▄▙▟█" for sign in text)
    assert (braille, blocks, text.isascii()) == (mode == "braille", mode == "blocks", mode == "ascii")


def test_ascii_mode_is_ascii_in_every_drawing():
    viz = plain("ascii", 40, 8)
    grid = [[1.0, np.nan], [np.inf, 2.0]]
    drawn = [viz.heat_map(grid, names=["é", "b"]), viz.sparkline([1, 2, 3]), viz.table(("ä",), [["ö"]])]
    drawn += [viz.display_statistics("größe", [1.0]), viz.ascii_histogram([1.0, 2.0])]
    assert all(text.isascii() for text in drawn)


def test_colours_are_given_when_asked_for_and_never_otherwise(monkeypatch):
    grid = np.arange(6).reshape(2, 3)
    assert "\x1b[38;5;" in TerminalVisualizer(colours="256", mode="braille").heat_map(grid)
    assert "\x1b" not in TerminalVisualizer(colours="none").heat_map(grid)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[38" not in TerminalVisualizer().heat_map(grid)


def test_true_colours_are_given_too():
    # In a process of its own: rich remembers a style's codes for the first kind of terminal it met.
    call = "T(colours='truecolor', mode='blocks').heat_map([[1, 2]])"
    code = f"from sonde.debug import TerminalVisualizer as T; print({call})"
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True, timeout=240)
    assert b"\x1b[38;2;" in done.stdout


def test_statistics_are_those_of_the_values():
    text = plain().display_statistics("w", [1.0, 2.0, 3.0, 0.0, np.nan])
    found = dict(line.split() for line in text.splitlines()[2:])
    assert found["count"] == "5"
    assert found["nan"] == "1"
    assert float(found["mean"]) == 1.5
    assert float(found["std"]) == pytest.approx(np.std([1, 2, 3, 0], ddof=1), rel=1e-2)
    assert "accuracy" in plain().display_statistics("run", {"accuracy": 0.5})


def test_a_heat_map_marks_what_is_not_finite_and_fits_its_width():
    grid = np.ones((3, 500))
    grid[1, 250] = np.inf
    lines = plain(width=50).heat_map(grid, names=["a", "b", "c"]).splitlines()
    assert max(map(len, lines)) <= 50
    assert ["x" in line for line in lines[:3]] == [False, True, False]


def test_a_sparkline_is_as_long_as_its_values_or_its_width():
    assert len(plain("braille").sparkline([1, 2, 3, 4])) == 4
    assert plain("braille").sparkline([1, 2, 3, 4])[-1] == "█"
    assert len(plain("braille").sparkline(np.arange(1000), width=30)) == 30


def test_sizes_and_modes_that_mean_nothing_are_refused():
    with pytest.raises(OptionError, match="at least 20 by 4; got"):
        TerminalVisualizer(3, 2)
    with pytest.raises(OptionError, match="braille, blocks, ascii"):
        TerminalVisualizer(mode="pixels")
    with pytest.raises(OptionError, match="bins=0"):
        plain().ascii_histogram([1.0], 0)
    with pytest.raises(OptionError, match="2 places and 3 values"):
        plain().ascii_line_plot([1, 2], [1, 2, 3])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(width=32), max_size=60), st.integers(20, 100), st.integers(1, 30))
def test_any_numbers_are_drawn_within_the_width(values, width, bins):
    viz = plain("ascii", width, 10)
    for text in (viz.ascii_histogram(values, bins), viz.ascii_line_plot(values), viz.sparkline(values)):
        assert text.isascii()
    assert len(viz.sparkline(values)) <= width
    if values:
        assert max(len(line) for line in viz.ascii_line_plot(values).splitlines()) <= width
