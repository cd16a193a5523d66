"""Heat maps and histograms in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Group
from rich.style import Style
from rich.text import Text

from sonde.analysis import Values
from sonde.core import schema
from sonde.core.schema import Bins
from sonde.views.terminal.plot import power_of_ten, shares
from sonde.views.terminal.style import BAD, BAR, CROSS, QUIET, Look, ramp, short

# --------------------------------------------------------------------------------
# Heat maps: rows by columns of numbers as colours, or as shades where there are no colours.


_SHADES: Final = "·░▒▓█"
_ASCII_SHADES: Final = ".:-=+*#%@"
# Up to this many rows each gets a line and a name; beyond, two rows share a line as half blocks.
_ROOMY_ROWS: Final = 24
_MOST_DECADES: Final = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class HeatMap:
    """Values [rows, columns], NaN where absent, with the names of the rows and the labels below the columns."""

    values: Values
    names: Sequence[str]
    left: str = ""
    right: str = ""
    bad: NDArray[np.bool_] | None = None
    log: bool = True
    unit: str = ""
    styles: Sequence[str] = field(default=())


def heat_map(data: HeatMap, look: Look) -> Group:
    """Draw a heat map with a legend; one character per column."""
    placed, low, high = _placed(data)
    bad = np.zeros(data.values.shape, dtype=np.bool_) if data.bad is None else data.bad
    gutter = min(max((len(name) for name in data.names), default=0), max(8, look.width // 3))
    dense = look.colour and look.unicode and len(placed) > _ROOMY_ROWS
    rows = range(0, len(placed), 2) if dense else range(len(placed))
    lines = []
    for row in rows:
        style = data.styles[row] if row < len(data.styles) else ""
        line = Text.assemble((look.fit(data.names[row], gutter).ljust(gutter), style), " ", no_wrap=True)
        for column in range(placed.shape[1]):
            if dense:
                line.append_text(_half_blocks(placed, bad, row, column))
            else:
                line.append_text(cell(float(placed[row, column]), bool(bad[row, column]), look))
        lines.append(line)
    return Group(*lines, _under(data, gutter, placed.shape[1]), _legend(low, high, data, gutter, look))


def _placed(data: HeatMap) -> tuple[Values, float, float]:
    values = data.values.astype(np.float64)
    if data.log:
        sizes = np.abs(values)
        values = np.log10(sizes, out=np.full(values.shape, np.nan), where=np.isfinite(sizes) & (sizes > 0))
    known = values[np.isfinite(values)]
    if not len(known):
        return np.full(values.shape, np.nan), np.nan, np.nan
    low, high = _contrast(known) if data.log else (float(known.min()), float(known.max()))
    values = np.clip(values, low, high)
    placed = shares(values, low, high) if high > low else np.where(np.isfinite(values), 0.5, np.nan)
    # A zero is below every magnitude, not absent.
    placed = np.where((data.values == 0) & data.log, 0.0, placed)
    return placed, *((power_of_ten(low), power_of_ten(high)) if data.log else (low, high))


def _contrast(logs: Values) -> tuple[float, float]:
    # What is far from the rest is drawn in the last colour, so that the rest keeps its differences.
    middle = float(np.median(logs))
    return max(float(logs.min()), middle - _MOST_DECADES), min(float(logs.max()), middle + _MOST_DECADES)


def cell(share: float, bad: bool, look: Look) -> Text:
    """Return one character as bright as `share`, from 0 to 1; a cross for what is bad, a blank for what is unknown."""
    if bad:
        return Text(look.pick(CROSS, "x"), BAD)
    if np.isnan(share):
        return Text(" ")
    if look.colour and look.unicode:
        return Text("█", Style(color=ramp(share)))
    shades = look.pick(_SHADES, _ASCII_SHADES)
    return Text(shades[min(int(share * len(shades)), len(shades) - 1)])


def _half_blocks(placed: Values, bad: NDArray[np.bool_], row: int, column: int) -> Text:
    below = row + 1 < len(placed)
    if bad[row, column] or (below and bad[row + 1, column]):
        return Text(CROSS, BAD)
    top, bottom = placed[row, column], placed[row + 1, column] if below else np.nan
    if np.isnan(top) and np.isnan(bottom):
        return Text(" ")
    if np.isnan(top):
        return Text("▄", Style(color=ramp(float(bottom))))
    return Text("▀", Style(color=ramp(float(top)), bgcolor=None if np.isnan(bottom) else ramp(float(bottom))))


def _under(data: HeatMap, gutter: int, width: int) -> Text:
    space = max(1, width - len(data.left) - len(data.right))
    return Text(" " * (gutter + 1) + data.left + " " * space + data.right, QUIET)


def _legend(low: float, high: float, data: HeatMap, gutter: int, look: Look) -> Text:
    if np.isnan(low):
        return Text(" " * (gutter + 1) + "nothing to draw", QUIET)
    line = Text(" " * (gutter + 1))
    line.append(f"{short(low)} ", QUIET)
    for step in range(12):
        line.append_text(cell(step / 11, False, look))
    line.append(f" {short(high)}" + (f"  {data.unit}" if data.unit else ""), QUIET)
    return line


# --------------------------------------------------------------------------------
# Histograms over the log2 bins of a summary: which magnitudes a tensor is made of.


_HEIGHTS: Final = " ▁▂▃▄▅▆▇█"
_SUPERSCRIPTS: Final = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_LEAST_BINS: Final = 12
_LABEL_EVERY: Final = 4
# Small magnitudes thin out by half from bin to bin; large ones are few and matter.
_TAIL: Final = 1e-3


def histogram_plot(bins: Bins, look: Look, *, height: int = 6) -> Group:
    """Draw one column per power of two of |x|, from the small ones (but for the last thousandth) to the large."""
    total = float(bins.sum())
    if total == 0:
        return Group(Text("no finite, non-zero elements", QUIET))
    first, last = visible_bins(bins)
    shares = bins[first : last + 1] / total
    wide = max(1, min(4, (look.width - 8) // len(shares)))
    top = float(shares.max())
    lines = []
    for row in range(height):
        label = f"{top:.0%}" if row == 0 else ""
        wall = look.pick("┤" if row == 0 else "│", "+" if row == 0 else "|")
        text = Text.assemble((f"{label:>5} {wall}", QUIET))
        for share in shares:
            text.append(_cell(float(share) / top * height - (height - 1 - row), look) * wide, BAR)
        lines.append(text)
    floor = look.pick("─", "-") * (len(shares) * wide)
    lines += [Text(" " * 6 + look.pick("└", "+") + floor, QUIET), _labels(first, last, wide, look)]
    return Group(*lines)


def power_of_two(exponent: int, look: Look) -> str:
    """Write a power of two."""
    return look.pick("2" + str(exponent).translate(_SUPERSCRIPTS), f"2^{exponent}")


def visible_bins(bins: Bins) -> tuple[int, int]:
    """Return the first and last bin to draw: all but a long thin tail at either end, and no fewer than a dozen."""
    shares = np.cumsum(bins) / bins.sum()
    first = int(np.searchsorted(shares, _TAIL))
    last = int(np.searchsorted(shares, 1 - _TAIL / 100))
    missing = max(0, _LEAST_BINS - (last - first + 1))
    first = max(0, first - missing // 2 - missing % 2)
    return first, min(schema.NUM_BINS - 1, max(last + missing // 2, first + _LEAST_BINS - 1))


def _cell(filled: float, look: Look) -> str:
    """Return the sign for one character of a column that is filled from below by `filled` (0 to 1, or beyond)."""
    if look.unicode:
        # What is there at all must be seen: the least sign is an eighth.
        eighths = int(np.ceil(np.clip(filled, 0.0, 1.0) * 8 - 1e-9))
        return _HEIGHTS[eighths]
    return "#" if filled >= 0.5 else ("." if filled > 0 else " ")


def _labels(first: int, last: int, wide: int, look: Look) -> Text:
    line = [" "] * ((last - first + 1) * wide + 8)
    end = 0
    for index in range(first, last + 1):
        exponent = index + schema.FIRST_EXPONENT
        start = (index - first) * wide
        if exponent % _LABEL_EVERY == 0 and start >= end:
            label = power_of_two(exponent, look)
            line[start : start + len(label)] = label
            end = start + len(label) + 1
    return Text(" " * 7 + "".join(line).rstrip() + "  |x|", QUIET)
