"""Keys from a terminal, one at a time, without waiting for Enter."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from types import TracebackType
from typing import Any, Final, Self

_NAMES: Final = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1b[C": "right",
    b"\x1b[D": "left",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1bOC": "right",
    b"\x1bOD": "left",
    b"\x1b": "escape",
    b"\t": "tab",
    b" ": "space",
    b"\x03": "ctrl-c",
}


class Keyboard:
    """Reads keys while it is open; the terminal is as before when it is closed."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = sys.stdin.fileno() if descriptor is None else descriptor
        self._before: list[Any] | None = None

    def __enter__(self) -> Self:
        self._before = termios.tcgetattr(self._descriptor)
        tty.setcbreak(self._descriptor)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)

    def read(self, timeout_s: float) -> str | None:
        """Return the next key by name; None if none came in time."""
        ready, _, _ = select.select([self._descriptor], [], [], timeout_s)
        if not ready:
            return None
        pressed = os.read(self._descriptor, 1)
        if not pressed:
            return "q"  # the terminal is gone
        if pressed == b"\x1b":
            pressed += self._rest()
        return _NAMES.get(pressed, pressed.decode("ascii", "ignore"))

    def _rest(self) -> bytes:
        """Read the rest of an arrow key, which comes at once or not at all."""
        ready, _, _ = select.select([self._descriptor], [], [], 0.02)
        return os.read(self._descriptor, 2) if ready else b""
