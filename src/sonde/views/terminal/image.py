"""A small image in a terminal: one cell of two characters per pixel."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from sonde.views.terminal.axis import shares
from sonde.views.terminal.heatmap import cell
from sonde.views.terminal.look import Look


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
