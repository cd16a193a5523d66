"""The live view of a run: one screen, several pages, redrawn as the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

from sonde.analysis import column_edges, columns
from sonde.analysis.loop import phase_shares
from sonde.records import Site
from sonde.store import Run
from sonde.views.terminal.bars import bar, sparkline
from sonde.views.terminal.events import event_table
from sonde.views.terminal.findings import ending_line, finding_card, finding_lines
from sonde.views.terminal.style import GOOD, QUIET, TITLE, Look, short, size
from sonde.views.terminal.summary import (
    Page,
    layers_part,
    loss_part,
    over_time_part,
    read_page,
    run_header,
)
from sonde.views.terminal.tables import flow_bars, section_title

RECENT_STEPS: Final = 2000
"""How far back the tables look: a live view is about now."""
PAGES: Final = ("overview", "findings", "layers", "gradients", "time", "events")


@dataclass(frozen=True, slots=True)
class View:
    """What is on the screen: which page, and how far it is scrolled."""

    page: int = 0
    scroll: int = 0
    paused: bool = False

    def press(self, key: str) -> View | None:
        """Return the view after a key; None if it was the one to leave."""
        if key in ("q", "escape", "ctrl-c"):
            return None
        if key.isdigit() and 1 <= int(key) <= len(PAGES):
            return replace(self, page=int(key) - 1, scroll=0)
        moves: dict[str, Callable[[], View]] = {
            "right": lambda: replace(self, page=(self.page + 1) % len(PAGES), scroll=0),
            "tab": lambda: replace(self, page=(self.page + 1) % len(PAGES), scroll=0),
            "left": lambda: replace(self, page=(self.page - 1) % len(PAGES), scroll=0),
            "down": lambda: replace(self, scroll=self.scroll + 1),
            "j": lambda: replace(self, scroll=self.scroll + 1),
            "up": lambda: replace(self, scroll=max(0, self.scroll - 1)),
            "k": lambda: replace(self, scroll=max(0, self.scroll - 1)),
            "space": lambda: replace(self, scroll=self.scroll + 10),
            "p": lambda: replace(self, paused=not self.paused),
        }
        return moves[key]() if key in moves else self


class Screen:
    """Draws a view of a run to exactly the size of the terminal."""

    def __init__(self, run: Run, page: Page, view: View, look: Look, height: int) -> None:
        self._run, self._page, self._view = run, page, view
        self._look, self._height = look, height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        body = console.render_lines(Group(*self._body()), options.update(height=None), pad=False)
        room = max(1, self._height - 3)
        # Scrolling ends where the last line is at the bottom.
        start = min(self._view.scroll, max(0, len(body) - room))
        shown = body[start : start + room]
        yield self._tabs()
        yield Text("")
        for line in shown:
            yield from line
            yield Segment.line()
        for _ in range(room - len(shown)):
            yield Segment.line()
        yield self._footer(start + room < len(body))

    def _tabs(self) -> Text:
        text = Text(no_wrap=True, overflow="ellipsis")
        for number, name in enumerate(PAGES, 1):
            here = number - 1 == self._view.page
            text.append(f" {number} {name} ", "reverse" if here else QUIET)
        return text

    def _footer(self, more: bool) -> Text:
        state = "paused" if self._view.paused else self._page.facts.status
        keys = "1-6 pages   up/down scroll   p pause   q quit" + ("   more below" if more else "")
        return Text.assemble((f" {state} ", "reverse"), " ", (keys, QUIET), no_wrap=True, overflow="ellipsis", end="")

    def _body(self) -> Iterator[RenderableType]:
        page, look = self._page, self._look
        name = PAGES[self._view.page]
        if name == "findings":
            yield from _findings(page, look)
        elif name == "layers":
            yield layers_part(page, look)
        elif name == "gradients":
            yield from _gradients(page, look)
        elif name == "time":
            yield from time_part(self._run, look)
        elif name == "events":
            yield event_table(page.events) if page.events else Text("No events.", QUIET)
        else:
            yield run_header(page.facts, look)
            if page.ending is not None:
                yield ending_line(page.ending, look)
            if page.findings:
                yield finding_lines(page.findings, look)
            yield loss_part(page, look)
            yield layers_part(page, look)


def read_top(run: Run) -> Page:
    """Read what the view shows."""
    return read_page(run, last=RECENT_STEPS)


def _findings(page: Page, look: Look) -> Iterator[RenderableType]:
    if not page.findings:
        yield Text("Nothing wrong was found.", GOOD)
    for finding in page.findings:
        yield finding_card(finding, look)
        yield Text("")


def _gradients(page: Page, look: Look) -> Iterator[RenderableType]:
    if not page.flow:
        yield Text("No gradients were recorded.", QUIET)
        return
    yield over_time_part(page, look)
    yield section_title("gradient flow, first layer to last", look)
    yield flow_bars(page.flow, look)


def time_part(run: Run, look: Look) -> Iterator[RenderableType]:
    """Return where the time of a step goes, and what memory does."""
    yield section_title("time of a step", look)
    shares = phase_shares(run)
    if shares is None:
        yield Text("No step times were recorded.", QUIET)
    else:
        yield Text(f"{short(1000 * shares.step_s)} ms a step (median), over {shares.steps:,} recorded steps", QUIET)
        width = max(10, look.width - 24)
        for phase, share in shares.shares.items():
            yield Text.assemble((f"{phase:<12}", TITLE), f"{share:>5.0%} ", bar(share, width, look))
    yield section_title("memory", look)
    memory = [site for site in run.sites if _is_memory(site)]
    if not memory:
        yield Text("No memory was recorded.", QUIET)
    for site in memory:
        series = run.series(site, "value")
        values = series.values[np.isfinite(series.values)]
        if len(values):
            width = max(10, look.width - 42)
            edges = column_edges(int(series.steps[0]), int(series.steps[-1]), width)
            curve = sparkline(columns(series.steps, series.values, edges), look)
            yield Text.assemble((f"{site.name:<28}", TITLE), f"{size(int(values[-1])):>10}  ", curve)


def _is_memory(site: Site) -> bool:
    words = ("rss", "memory", "allocated", "reserved", "available")
    return site.quantity == "scalar" and any(word in site.name for word in words)
