"""Which line of the user's program is running: the innermost frame that is neither torch's nor Sonde's."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

import torch

_SONDE: Final = str(Path(__file__).resolve().parent.parent)
_TORCH: Final = str(Path(torch.__file__).resolve().parent)
_STDLIB: Final = sysconfig.get_path("stdlib")
_PACKAGES: Final = ("site-packages", "dist-packages")

next_sequence: Final[Callable[[], int]] = vars(torch.autograd)["_get_sequence_nr"]
"""Returns the number that the next autograd node of this thread will have; they count operations in order."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of source code."""

    file: str
    number: int
    function: str = ""

    @property
    def text(self) -> str:
        """The line itself, or nothing where its file cannot be read."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


def current_line(boundary: frozenset[CodeType] = frozenset()) -> Line | None:
    """Return the user's line that is running, or None if the stack reaches `boundary` before any line of the user's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code in boundary:
            return None
        if is_users(code.co_filename):
            return Line(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back
    return None


_known: dict[str, bool] = {}


def is_users(file: str) -> bool:
    """Say whether a file is neither torch's nor Sonde's nor Python's own."""
    known = _known.get(file)
    if known is None:
        known = _known[file] = _is_users(file)
    return known


def _is_users(file: str) -> bool:
    if file.startswith("<") and not file.startswith(("<ipython", "<stdin")):
        return False
    if file.startswith((_SONDE, _TORCH)):
        return False
    return not file.startswith(_STDLIB) or any(part in file for part in _PACKAGES)
