import numpy as np

from sonde.views.terminal.plot import Canvas


def lines(canvas, **how):
    return [text.plain for text in canvas.lines(**how)]


def test_a_diagonal_runs_from_corner_to_corner():
    canvas = Canvas(4, 2)
    canvas.draw(np.array([0.0, 1.0]), np.array([0.0, 1.0]))
    assert lines(canvas) == ["  ⡠⠊", "⡠⠊  "]
    assert lines(canvas, unicode=False) == ["  -'", "-'  "]


def test_a_gap_is_not_drawn_over_and_a_lone_point_is_a_dot():
    canvas = Canvas(5, 1)
    canvas.draw(np.linspace(0, 1, 5), np.array([0.0, 0.0, np.nan, 0.0, np.nan]))
    assert lines(canvas) == ["⣀⡀ ⢀ "]


def test_what_lies_outside_does_no_harm():
    canvas = Canvas(3, 1)
    canvas.draw(np.array([-5.0, 5.0]), np.array([0.5, 0.5]))
    canvas.draw(np.array([np.nan]), np.array([0.5]))
    assert len(lines(canvas)[0]) == 3


def test_the_later_curve_gives_its_colour():
    canvas = Canvas(2, 1)
    canvas.draw(np.array([0.0, 1.0]), np.array([0.0, 0.0]), "red")
    canvas.draw(np.array([0.0, 0.0]), np.array([0.0, 1.0]), "blue")
    assert [str(span.style) for span in canvas.lines()[0].spans] == ["blue", "red"]
