from __future__ import annotations

import numpy as np
from rich.console import Console

from sonde.views.terminal import Look, picture


def plain(values):
    return picture(np.array(values), Look.of(Console(no_color=True, width=80, force_terminal=False))).plain


def test_a_picture_has_two_characters_per_pixel_and_grows_brighter():
    lines = plain([[0.0, 1.0], [0.5, 0.0]]).split("\n")
    assert [len(line) for line in lines] == [4, 4]
    assert lines[0][0] != lines[0][2] != lines[1][0]
    assert lines[0][0] == lines[1][2]


def test_what_is_not_finite_is_marked():
    marked = plain([[0.0, np.nan], [1.0, np.inf]]).split("\n")
    assert marked[0][2] == marked[1][2] not in (marked[0][0], marked[1][0])


def test_a_flat_picture_is_dark():
    assert len(set(plain([[3.0, 3.0]]))) == 1
