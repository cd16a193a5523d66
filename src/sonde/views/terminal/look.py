"""What the terminal can show: its width, its characters, its colours. Everything drawn here asks this once."""

from __future__ import annotations

import codecs
import os
import sys
from dataclasses import dataclass
from typing import IO, Final

from rich.console import Console

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
    """Lets a closed pipe through as the error it is; rich would end the process with an exit code of its own."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


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
