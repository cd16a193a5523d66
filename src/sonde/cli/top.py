"""`sonde top RUN`: a live view of a run that fills the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from sonde.cli.options import RunPath
from sonde.errors import OptionError

if TYPE_CHECKING:
    from sonde.store import Run

EXAMPLES = """
sonde top runs/first  # while it trains, or long after
"""

Interval = Annotated[float, typer.Option("--interval", min=0.1, metavar="SECONDS", help="Time between updates.")]


def top(run: RunPath, interval: Interval = 1.0) -> None:
    """Watch a run live, on the whole screen.

    Pages for loss, findings, worst layers, gradient flow, time, memory and events. Keys 1 to 6 or left and right choose
    a page, up and down scroll, p pauses, q quits. Training is not affected.
    """
    from sonde.cli.opening import open_run

    opened = open_run(run)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise OptionError(f"sonde top needs a terminal. Use: sonde show {run}, or sonde tail {run}")
    watch(opened, interval)


def watch(run: Run, interval: float, clock: Callable[[], float] = time.monotonic) -> None:
    """Draw until the user quits."""
    from sonde.cli.keys import Keyboard
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
