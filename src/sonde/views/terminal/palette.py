"""The colours of the terminal pages, in one place."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray
from rich.color import Color

from sonde.analysis import Level
from sonde.store.lease import Status

BAD: Final = "bold red"
ODD: Final = "yellow"
GOOD: Final = "green"
QUIET: Final = "dim"
TITLE: Final = "bold"
CURVE: Final = "bold cyan"
RAW_CURVE: Final = "blue"
BAR: Final = "cyan"

LEVEL_STYLES: Final[dict[Level, str]] = {"bad": BAD, "odd": ODD, "fine": ""}
STATUS_STYLES: Final[dict[Status, str]] = {
    "live": "bold cyan",
    "finished": "bold green",
    "interrupted": ODD,
    "failed": BAD,
    "crashed": BAD,
}

# Anchors of a perceptually even ramp from dark to bright (after matplotlib's viridis): readable on dark and light
# backgrounds, and in order also for people who do not tell red from green.
_RAMP: Final = np.array(
    [
        (68, 1, 84),
        (71, 44, 122),
        (59, 81, 139),
        (44, 113, 142),
        (33, 144, 141),
        (39, 173, 129),
        (92, 200, 99),
        (170, 220, 50),
        (253, 231, 37),
    ],
    dtype=np.float64,
)


def ramp(share: float) -> Color:
    """Return the colour of a share between 0 and 1."""
    anchors = np.linspace(0.0, 1.0, len(_RAMP))
    mixed: NDArray[np.float64] = np.array([np.interp(share, anchors, channel) for channel in _RAMP.T])
    red, green, blue = (round(float(channel)) for channel in mixed)
    return Color.from_rgb(red, green, blue)
