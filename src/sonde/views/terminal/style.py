"""How the terminal pages look: colours, characters, width, and numbers as people read them."""

from __future__ import annotations

import codecs
import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import IO, Final

import numpy as np
from numpy.typing import NDArray
from rich.color import Color
from rich.console import Console
from rich.segment import Segment

from sonde.analysis import Level
from sonde.core.short_names import DOT, MODEL, short_keys
from sonde.errors import escaped
from sonde.store.lease import Status

# --------------------------------------------------------------------------------
# The colours of the terminal pages, in one place.


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


# --------------------------------------------------------------------------------
# Numbers as people read them: short, and the same width for the same thing.


ABSENT = "-"


def printable(text: object) -> str:
    """Return a text on one line, with control characters and the like shown as escapes."""
    return escaped(str(text).replace("\n", " "))


def short(value: float | None) -> str:
    """Write a number in three digits. None, which was not measured, is a dash; NaN was measured and is NaN.

    >>> [short(v) for v in (0.0, 0.5, 12.345, 1234.0, 0.000123, -2.5e8, float("nan"), None)]
    ['0', '0.500', '12.3', '1234', '1.23e-4', '-2.50e8', 'NaN', '-']
    """
    if value is None:
        return ABSENT
    if math.isnan(value):
        return "NaN"
    if value == 0 or math.isinf(value):
        return "0" if value == 0 else f"{value:+.0f}".replace("+", "")
    size = abs(value)
    if 1e-2 <= size < 1e4:
        # Rounding may carry into the next decade; `.2e` knows the exponent after rounding.
        digits = max(0, 2 - int(f"{size:.2e}".partition("e")[2]))
        return f"{value:.{digits}f}"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def count(value: int) -> str:
    """Write a count: exactly up to 99,999, then in thousands, millions and billions.

    >>> count(812), count(121_482), count(7_000_000_000)
    ('812', '121 k', '7.0 G')
    """
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor and value >= 100_000:
            scaled = value / factor
            return f"{scaled:.0f} {unit}" if scaled >= 10 else f"{scaled:.1f} {unit}"
    return f"{value:,}"


def size(nbytes: int) -> str:
    """Write a number of bytes.

    >>> size(512), size(4_200_000)
    ('512 B', '4.2 MB')
    """
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def duration(seconds: float) -> str:
    """Write a length of time.

    >>> duration(4.21), duration(75), duration(7300), duration(200_000)
    ('4.2 s', '1 min 15 s', '2 h 01 min', '2 d 7 h')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes} min {rest:02d} s"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if days else f"{hours} h {minutes:02d} min"


def plural(number: int, word: str) -> str:
    """Write a count with its noun.

    >>> plural(1, "step"), plural(500, "step")
    ('1 step', '500 steps')
    """
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


# --------------------------------------------------------------------------------
# What the terminal can show: its width, its characters, its colours. Everything drawn here asks this once.


# What each of our characters becomes where the encoding lacks it. One character for one keeps columns aligned.
CROSS: Final = "\N{MULTIPLICATION SIGN}"
_PLAIN: Final = str.maketrans(CROSS + "·…→↑↓✓✗●○▲│─┤└├┬┴≥≤≈█▌━", "x..>^v+x*o^|-|`|--><~##=")


@dataclass(frozen=True, slots=True)
class Look:
    """How to draw on one console."""

    width: int = 80
    unicode: bool = True
    colour: bool = True
    blocks: bool = False
    """Draw curves with blocks, for fonts that have no braille."""

    @classmethod
    def of(cls, console: Console) -> Look:
        """Ask a console what it can show."""
        colour = console.color_system is not None and not console.no_color
        return cls(console.width, not console.options.ascii_only, colour)

    def pick(self, pretty: str, plain: str) -> str:
        """Return the character that this terminal can show."""
        return pretty if self.unicode else plain

    def fit(self, name: str, width: int) -> str:
        """Cut a dotted name to `width` from the left: its end says more than its beginning."""
        return name if len(name) <= width else self.pick("…", "~") + name[len(name) - width + 1 :]

    def fit_names(self, names: Sequence[str], width: int) -> list[str]:
        """Return names that fit into `width`: as they are where all do, else by block and role, cut where they must."""
        shown = [name or MODEL for name in names]
        if any(len(name) > width for name in shown):
            shown = short_keys(names, keep_role=True)
        return [self.fit(name if self.unicode else name.replace(DOT, " "), width) for name in shown]


def make_console(*, file: IO[str] | None = None, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console that never fails on a character and draws no tables wider than what it writes to.

    Colours follow rich: none when not a terminal or when NO_COLOR is set, 256 where there are no more.
    """
    stream = file or (sys.stderr if stderr else sys.stdout)
    _write_what_it_can(stream)
    if width is None and os.environ.get("COLUMNS", "").isdigit():
        width = int(os.environ["COLUMNS"])
    return _Console(file=stream, width=width, highlight=False, soft_wrap=False)


class _Console(Console):
    """Shows control characters of any text as escapes, and lets a closed pipe through as the error it is.

    Texts may come from a stranger's run. All that is printed passes here, so nothing that prints has to think of it.
    """

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would end the process with an exit code of its own

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(
            each if each.control else each._replace(text=escaped(each.text)) for each in buffer
        )


def _write_what_it_can(stream: IO[str]) -> None:
    codecs.register_error("sonde.plain", _plain_sign)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None and not encoding.lower().startswith("utf"):
        reconfigure(errors="sonde.plain")


def _plain_sign(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end].translate(_PLAIN)
    return "".join(sign if ord(sign) < 128 else "?" for sign in signs), error.end
