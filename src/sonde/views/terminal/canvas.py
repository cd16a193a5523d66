"""A small canvas of braille dots: two across and four down in every character."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

Values = NDArray[np.float64]

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
