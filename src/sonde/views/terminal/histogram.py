"""Histograms over the log2 bins of a summary: which magnitudes a tensor is made of."""

from __future__ import annotations

from typing import Final

import numpy as np
from rich.console import Group
from rich.text import Text

from sonde import schema
from sonde.schema import Bins
from sonde.views.terminal.look import Look
from sonde.views.terminal.palette import BAR, QUIET

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
