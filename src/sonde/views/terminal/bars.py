"""Small charts of one or a few lines: sparklines, bars, small images."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from sonde.analysis import Values
from sonde.views.terminal.heatmap import cell
from sonde.views.terminal.plot import shares
from sonde.views.terminal.style import BAD, BAR, CROSS, Look

# --------------------------------------------------------------------------------
# Sparklines and bars: a curve, or a size, in one line of text.


_HEIGHTS: Final = "▁▂▃▄▅▆▇█"
_ASCII_HEIGHTS: Final = "_.-=+*#@"
# Below these spans a curve is drawn as level: noise of a few percent should not look like mountains.
_LEAST_DECADES: Final = 0.2
_LEAST_SHARE: Final = 0.02
_LARGEST: Final = float(np.finfo(np.float64).max)


def sparkline(
    values: Values, look: Look, *, bad: NDArray[np.bool_] | None = None, log: bool = False, style: str = BAR
) -> Text:
    """Draw one character per value: taller is larger, blank is absent, a red cross is not finite.

    Args:
        values: One value per character; NaN is absent.
        look: What the terminal can show.
        bad: Where to draw a cross, whatever the value.
        log: Draw magnitudes in decades.
        style: Colour of the curve.

    """
    heights = look.pick(_HEIGHTS, _ASCII_HEIGHTS)
    cross = np.isinf(values) if bad is None else bad | np.isinf(values)
    levels = _levels(_scaled(values, log), _LEAST_DECADES if log else None, len(heights))
    text = Text(no_wrap=True)
    for level, crossed in zip(levels, cross, strict=True):
        if crossed:
            text.append(look.pick(CROSS, "x"), BAD)
        else:
            text.append(heights[level] if level >= 0 else " ", style)
    return text


def _scaled(values: Values, log: bool) -> Values:
    finite = np.isfinite(values)
    if not log:
        return np.where(finite, values, np.nan)
    sizes = np.abs(values)
    logs = np.log10(sizes, out=np.full(len(sizes), np.nan), where=finite & (sizes > 0))
    # Zero has no logarithm, but it is the smallest there is, not absent.
    floor = np.nanmin(logs) - 1.0 if np.isfinite(logs).any() else 0.0
    return np.where(finite & (sizes == 0), floor, logs)


def _levels(values: Values, least: float | None, num_levels: int) -> NDArray[np.int64]:
    known = values[np.isfinite(values)]
    if not len(known):
        return np.full(len(values), -1)
    low, high = float(known.min()), float(known.max())
    room = max(least if least is not None else _LEAST_SHARE * max(abs(low), abs(high)), 1e-300)
    if high - low < room:
        middle = low / 2 + high / 2
        low, high = max(middle - room / 2, -_LARGEST), min(middle + room / 2, _LARGEST)
    share = shares(np.where(np.isfinite(values), values, low), low, high)
    level = np.clip((share * num_levels).astype(np.int64), 0, num_levels - 1)
    return np.where(np.isfinite(values), level, -1)


def bar(share: float, width: int, look: Look, *, style: str = BAR) -> Text:
    """Draw a bar that fills a share of `width` characters, to half a character.

    Heavy lines leave air between the rows of a table, where blocks would run together into a slab.
    """
    share = min(max(share, 0.0), 1.0) if np.isfinite(share) else 0.0
    full, half = divmod(round(share * width * 2), 2)
    text = look.pick("━", "=") * full + (look.pick("╸", "-") if half else "")
    return Text(text.ljust(width), style)


# --------------------------------------------------------------------------------
# A small image in a terminal: one cell of two characters per pixel.


def picture(values: NDArray[np.floating], look: Look) -> Text:
    """Draw a 2-D array, its smallest value dark and its largest bright; what is not finite is marked."""
    pixels = np.asarray(values, dtype=np.float64)
    known = pixels[np.isfinite(pixels)]
    low, high = (known.min(), known.max()) if len(known) else (0.0, 0.0)
    placed = shares(pixels, float(low), float(high)) if high > low else np.zeros_like(pixels)
    bad = ~np.isfinite(pixels)
    text = Text(no_wrap=True)
    for row in range(len(pixels)):
        if row:
            text.append("\n")
        for column in range(pixels.shape[1]):
            mark = cell(float(placed[row, column]), bool(bad[row, column]), look)
            text.append_text(mark).append_text(mark)
    return text
