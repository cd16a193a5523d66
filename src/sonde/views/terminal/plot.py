"""Line plots in a terminal, drawn with braille dots and round ticks."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Group
from rich.text import Text

from sonde.analysis import Steps, Values, thin
from sonde.views.terminal.style import BAD, CURVE, QUIET, Look

# --------------------------------------------------------------------------------
# Round numbers along an axis, linear or logarithmic.


_LARGEST: Final = sys.float_info.max
_SMALLEST: Final = math.ulp(0.0)
LEAST_POWER, MOST_POWER = -323, 308
"""The least and the greatest power of ten that a float can hold."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of values and the ticks in it. `place` maps a value to a share of the axis."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def around(cls, values: Values, *, log: bool = False) -> Axis:
        """Return the axis that holds all finite values; a logarithmic one only where some are positive."""
        known = values[np.isfinite(values)]
        if log and (known > 0).any():
            known = known[known > 0]
        else:
            log = False
        if not len(known):
            return cls(0.0, 1.0)
        low, high = float(known.min()), float(known.max())
        if low == high:
            # A constant gets room on both sides, so that it runs through the middle.
            room = abs(low) * 0.1 or 1.0
            low, high = (low / 1.25, max(high * 1.25, high + _SMALLEST)) if log else (low - room, high + room)
            low, high = max(low, _SMALLEST if log else -_LARGEST), min(high, _LARGEST)
        return cls(low, high, log)

    def place(self, values: Values) -> Values:
        """Return where values lie, 0 at the low end and 1 at the high end; NaN for what has no place."""
        if not self.log:
            return shares(values, self.low, self.high)
        good = np.isfinite(values) & (values > 0)
        logs = np.log10(values, out=np.full(values.shape, np.nan), where=good)
        span = math.log10(self.high) - math.log10(self.low)
        return (logs - math.log10(self.low)) / span

    def ticks(self, most: int) -> list[float]:
        """Return at most `most` round values on the axis."""
        return log_ticks(self.low, self.high, most) if self.log else linear_ticks(self.low, self.high, most)


def shares(values: Values, low: float, high: float) -> Values:
    """Return where values lie between `low` and `high`, as shares; NaN for what is not finite.

    >>> shares(np.array([-1e308, 0.0, 1e308]), -1e308, 1e308).tolist()
    [0.0, 0.5, 1.0]
    """
    # A difference may be beyond the largest number; that of the halves is not.
    scale = 1.0 if math.isfinite(high - low) else 0.5
    known = np.where(np.isfinite(values), values, np.nan) * scale
    placed: Values = (known - low * scale) / (high * scale - low * scale)
    return placed


def power_of_ten(exponent: float) -> float:
    """Return ten to a power, at most the largest number."""
    return 10.0**exponent if exponent < math.log10(_LARGEST) else _LARGEST


def linear_ticks(low: float, high: float, most: int) -> list[float]:
    """Return round values (1, 2 or 5 times a power of ten apart) from `low` to `high`.

    >>> linear_ticks(0.0, 500.0, 6)
    [0.0, 100.0, 200.0, 300.0, 400.0, 500.0]
    """
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low or most < 1:
        return []
    # Divided one by one: their difference may be beyond the largest number, and a part of it below the smallest.
    exponent = math.floor(math.log10(max(high / most - low / most, _SMALLEST)))
    for factor in (1, 2, 5, 10, 20, 50):
        distance = factor * 10.0 ** max(exponent, LEAST_POWER)
        # A hair of tolerance, so that 0.3 / 0.1 counts as 3.
        first, last = math.ceil(low / distance - 1e-9), math.floor(high / distance + 1e-9)
        if last - first + 1 <= most:
            return [_rounded(i * distance, distance) for i in range(first, last + 1)]
    return []


def _rounded(value: float, distance: float) -> float:
    return round(value, max(0, 2 - math.floor(math.log10(distance)))) + 0.0


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Return powers of ten from `low` to `high`; 1-2-5 steps or linear ones where too few of them fit in.

    >>> log_ticks(2e-4, 3.0, 5)
    [0.001, 0.01, 0.1, 1.0]
    """
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last - first >= 1 and most >= 2:
        stride = math.ceil((last - first + 1) / most)
        return [10.0**power for power in range(first, last + 1) if power % stride == 0 or stride == 1]
    decades = range(max(math.floor(math.log10(low)), LEAST_POWER), min(math.ceil(math.log10(high)), MOST_POWER) + 1)
    fine = [factor * 10.0**power for power in decades for factor in (1, 2, 5)]
    fine = [tick for tick in fine if low <= tick <= high]
    return fine if 2 <= len(fine) <= most else linear_ticks(low, high, most)


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Write ticks with just the digits that tell them apart.

    >>> tick_labels([0.0, 0.5, 1.0]), tick_labels([1e-05, 0.001])
    (['0.0', '0.5', '1.0'], ['1e-5', '1e-3'])
    """
    sizes = [abs(tick) for tick in ticks if tick]
    if sizes and (max(sizes) >= 1e6 or min(sizes) < 1e-3):
        return [_scientific(tick) for tick in ticks]
    for digits in range(7):
        if all(abs(round(tick, digits) - tick) <= 1e-9 * max(abs(tick), 1e-9) for tick in ticks):
            return [f"{tick:,.{digits}f}" for tick in ticks]
    return [f"{tick:g}" for tick in ticks]


def _scientific(value: float) -> str:
    if value == 0:
        return "0"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}e{int(exponent)}"


# --------------------------------------------------------------------------------
# A small canvas of braille dots: two across and four down in every character.


_ACROSS, _DOWN = 2, 4
# The bit of each dot in U+2800 + bits, by row and column within a character.
_BITS: Final = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
# Without braille a character says at which height of its cell the curve passes.
_ASCII_HEIGHTS: Final = ("'", '"', "-", ".")


# By which of the four quarters of a cell are full: top left, top right, bottom left, bottom right.
_QUADRANTS: Final = " ▘▝▀▖▌▞▛▗▚▐▜▄▙▟█"


class Canvas:
    """Draws curves into a grid of characters. Coordinates are shares: (0, 0) is bottom left, (1, 1) top right."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._dots = np.zeros((height * _DOWN, width * _ACROSS), dtype=np.bool_)
        self._styles: list[list[str]] = [[""] * width for _ in range(height)]

    def draw(self, x: Values, y: Values, style: str = "") -> None:
        """Draw a curve through points, broken where either coordinate is NaN; a point on its own is a dot."""
        columns = np.round(x * (self.width * _ACROSS - 1))
        rows = np.round((1 - y) * (self.height * _DOWN - 1))
        known = np.isfinite(columns) & np.isfinite(rows)
        for i in range(len(columns)):
            if not known[i]:
                continue
            joined = i + 1 < len(columns) and known[i + 1]
            end = i + 1 if joined else i
            self._line(int(columns[i]), int(rows[i]), int(columns[end]), int(rows[end]), style)

    def _line(self, x0: int, y0: int, x1: int, y1: int, style: str) -> None:
        length = max(abs(x1 - x0), abs(y1 - y0)) + 1
        xs = np.round(np.linspace(x0, x1, length)).astype(np.intp)
        ys = np.round(np.linspace(y0, y1, length)).astype(np.intp)
        inside = (xs >= 0) & (xs < self._dots.shape[1]) & (ys >= 0) & (ys < self._dots.shape[0])
        self._dots[ys[inside], xs[inside]] = True
        for column, row in {(int(a) // _ACROSS, int(b) // _DOWN) for a, b in zip(xs[inside], ys[inside], strict=True)}:
            self._styles[row][column] = style

    def lines(self, *, unicode: bool = True, blocks: bool = False) -> list[Text]:
        """Return one text per row of characters: of braille, of blocks (a quarter as fine), or of plain signs."""
        draw = (_blocks if blocks else _braille) if unicode else _ascii
        cells = self._dots.reshape(self.height, _DOWN, self.width, _ACROSS).swapaxes(1, 2)
        texts = []
        for row in range(self.height):
            text = Text(no_wrap=True)
            for column in range(self.width):
                cell = cells[row, column]
                text.append(draw(cell), self._styles[row][column] or None)
            texts.append(text)
        return texts


def _braille(cell: NDArray[np.bool_]) -> str:
    bits = int(_BITS[cell].sum())
    # A blank is a plain space: some fonts draw the empty pattern as eight circles.
    return chr(0x2800 + bits) if bits else " "


def _blocks(cell: NDArray[np.bool_]) -> str:
    quarters = (cell[:2, 0], cell[:2, 1], cell[2:, 0], cell[2:, 1])
    return _QUADRANTS[sum(1 << place for place, quarter in enumerate(quarters) if quarter.any())]


def _ascii(cell: NDArray[np.bool_]) -> str:
    heights = np.flatnonzero(cell.any(axis=1))
    if not len(heights):
        return " "
    return "|" if len(heights) > 2 else _ASCII_HEIGHTS[int(heights.mean())]


# --------------------------------------------------------------------------------
# Line plots: curves over steps with round ticks, gaps where there is nothing to draw, and marks at steps of note.


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """One curve of a plot. A later curve is drawn over an earlier one."""

    steps: Steps
    values: Values
    label: str = ""
    style: str = CURVE


@dataclass(frozen=True, slots=True)
class PlotOptions:
    """How to draw a plot: its height in lines, its scale, and steps to mark under the axis."""

    height: int = 8
    log: bool = False
    marks: Sequence[int] = field(default=())


def line_plot(curves: Sequence[Curve], look: Look, options: PlotOptions | None = None) -> Group:
    """Draw curves over steps, as wide as the look says."""
    options = options or PlotOptions()
    everything = np.concatenate([curve.values for curve in curves]) if curves else np.empty(0)
    steps = np.concatenate([curve.steps for curve in curves]) if curves else np.empty(0, dtype=np.int64)
    y_axis = Axis.around(everything, log=options.log)
    x_axis = Axis.around(steps.astype(np.float64))
    y_labels = _y_labels(y_axis, options.height)
    gutter = max((len(label) for label in y_labels.values()), default=0)
    canvas = Canvas(max(look.width - gutter - 2, 8), options.height)
    for curve in curves:
        # More points than dots cannot be seen; extremes are kept.
        at, of = thin(curve.steps, curve.values, canvas.width * 10)
        canvas.draw(x_axis.place(at.astype(np.float64)), y_axis.place(of), curve.style)
    lines = [
        Text.assemble((f"{y_labels.get(row, ''):>{gutter}} ", QUIET), (_wall(look, row in y_labels), QUIET), text)
        for row, text in enumerate(canvas.lines(unicode=look.unicode, blocks=look.blocks))
    ]
    lines += _x_lines(x_axis, canvas.width, gutter + 1, options.marks, look, whole=steps.dtype.kind in "iu")
    legend = [curve for curve in curves if curve.label]
    if len(legend) > 1:
        lines.append(_legend(legend, gutter + 2, look))
    return Group(*lines)


def _wall(look: Look, tick: bool) -> str:
    return look.pick("┤" if tick else "│", "+" if tick else "|")


def _y_labels(axis: Axis, height: int) -> dict[int, str]:
    ticks = axis.ticks(max(2, height // 2 + 1))
    rows = np.round((1 - axis.place(np.array(ticks))) * (height * 4 - 1)) // 4
    return dict(zip((int(row) for row in rows), tick_labels(ticks), strict=True))


def _x_lines(axis: Axis, width: int, indent: int, marks: Sequence[int], look: Look, *, whole: bool) -> list[Text]:
    # Steps are whole.
    ticks = [tick for tick in axis.ticks(max(2, width // 12)) if not whole or tick == int(tick)]
    labels = tick_labels(ticks)
    floor = [look.pick("─", "-")] * width
    under = [" "] * (width + 8)
    for tick, label in zip(ticks, labels, strict=True):
        column = _column(axis, tick, width)
        floor[column] = look.pick("┴", "+")
        start = max(0, min(column - len(label) // 2, width - len(label)))
        if "".join(under[max(start - 1, 0) : start + len(label) + 1]).strip() == "":
            under[start : start + len(label)] = label
    ground = Text(" " * indent + look.pick("└", "+"), QUIET)
    marked = {_column(axis, step, width) for step in marks if axis.low <= step <= axis.high}
    for column, sign in enumerate(floor):
        ground.append(*(look.pick("▲", "^"), BAD) if column in marked else (sign, QUIET))
    return [ground, Text(" " * (indent + 1) + "".join(under).rstrip(), QUIET)]


def _column(axis: Axis, step: float, width: int) -> int:
    return int(np.clip(round(float(axis.place(np.array([step]))[0]) * (width * 2 - 1)) // 2, 0, width - 1))


def _legend(curves: Sequence[Curve], indent: int, look: Look) -> Text:
    text = Text(" " * indent)
    for curve in curves:
        text.append(look.pick("──", "--") + " ", curve.style)
        text.append(curve.label + "   ", QUIET)
    return text
