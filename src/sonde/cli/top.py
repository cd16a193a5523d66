"""`sonde top RUN`: a live view of a run that fills the terminal."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

import typer

from sonde.cli.opening import RunPath, open_run
from sonde.errors import OptionError

if TYPE_CHECKING:
    from sonde.store import Run

with contextlib.suppress(ImportError):  # Windows has no such terminals
    import termios
    import tty


# --------------------------------------------------------------------------------
# Keys from a terminal, one at a time, without waiting for Enter.


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


# --------------------------------------------------------------------------------


EXAMPLES = """
sonde top runs/first  # while it trains, or long after
"""

Interval = Annotated[float, typer.Option("--interval", min=0.1, metavar="SECONDS", help="Time between updates.")]


def top(run: RunPath, interval: Interval = 1.0) -> None:
    """Watch a run live, on the whole screen.

    Pages for loss, findings, worst layers, gradient flow, time, memory and events. Keys 1 to 6 or left and right choose
    a page, up and down scroll, p pauses, q quits. Training is not affected.
    """
    opened = open_run(run)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise OptionError(f"sonde top needs a terminal. Use: sonde show {run}, or sonde tail {run}")
    if "termios" not in globals():
        raise OptionError(f"sonde top needs a POSIX terminal. Use: sonde view {run}, or sonde tail {run}")
    watch(opened, interval)


def watch(run: Run, interval: float, clock: Callable[[], float] = time.monotonic) -> None:
    """Draw until the user quits."""
    from sonde.views.terminal import Look, make_console
    from sonde.views.terminal.top import Screen, View, read_top

    console = make_console()
    view: View | None = View()
    with Keyboard() as keys, console.screen(hide_cursor=True) as screen:
        page, looked = read_top(run), clock()
        drawn: object = None
        while view is not None:
            shows = (id(page), view, console.size)
            if shows != drawn:  # what has not changed need not travel to the terminal again
                screen.update(Screen(run, page, view, Look.of(console), console.height))
                drawn = shows
            key = keys.read(max(0.0, interval - (clock() - looked)))
            if key is not None:
                view = view.press(key)
            elif not view.paused and (run.refresh() or run.status != page.facts.status):
                page = read_top(run)
            if key is None:
                looked = clock()
