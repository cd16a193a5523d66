"""Documents on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from rich.console import Console, JustifyMethod, RenderableType
from rich.table import Table as RichTable
from rich.text import Text as RichText

from sonde.views.document.model import (
    Block,
    Cell,
    Code,
    Curves,
    Document,
    Findings,
    Folded,
    Table,
    Text,
    Tiles,
    Tone,
    Values,
)
from sonde.views.terminal.events import one_line
from sonde.views.terminal.findings import finding_card
from sonde.views.terminal.plot import Curve, line_plot
from sonde.views.terminal.style import BAD, GOOD, ODD, QUIET, TITLE, Look, make_console

_STYLES: Final[dict[Tone, str]] = {"plain": "", "quiet": QUIET, "good": GOOD, "odd": ODD, "bad": BAD}


def print_document(document: Document, console: Console | None = None) -> None:
    """Print a document; figures are left out."""
    console = console or make_console()
    for part in _document(document, Look.of(console)):
        console.print(part)


def _document(document: Document, look: Look) -> Iterator[RenderableType]:
    yield RichText(one_line(document.title), TITLE)
    yield from _blocks(document.lead, look)
    for section in document.shown:
        body = list(_blocks(section.blocks, look))
        if body:
            yield RichText(f"\n{one_line(section.title)}", TITLE)
            yield from body


def _blocks(blocks: Sequence[Block], look: Look) -> Iterator[RenderableType]:
    for block in blocks:
        yield from _block(block, look)


def _block(block: Block, look: Look) -> Iterator[RenderableType]:
    if isinstance(block, Folded):
        yield from _blocks(block.blocks, look)
    elif isinstance(block, Text):
        yield RichText(one_line(block.text), _STYLES[block.tone])
    elif isinstance(block, Code):
        yield from (RichText(f"  {one_line(line)}", QUIET) for line in block.text.splitlines())
    elif isinstance(block, Tiles | Values):
        yield _table(Table((), [[Cell(name, "quiet"), value] for name, value in block.pairs]), look)
    elif isinstance(block, Table):
        yield _table(block, look)
        if block.most is not None and len(block.rows) > block.most:
            yield RichText(f"and {len(block.rows) - block.most:,} more", QUIET)
    elif isinstance(block, Findings):
        for finding in block.findings:
            yield from (finding_card(finding, look), RichText(""))
    elif isinstance(block, Curves):
        yield from _curves(block, look)


def _curves(block: Curves, look: Look) -> Iterator[RenderableType]:
    for name, values in block.curves.items():
        yield RichText(one_line(name), QUIET)
        yield line_plot([Curve(np.arange(len(values)), np.asarray(values, np.float64))], look)


def _table(table: Table, look: Look) -> RichTable:
    made = RichTable(
        box=None, show_header=bool(table.columns), header_style=QUIET, pad_edge=False, padding=(0, 2, 0, 0)
    )
    # Names stay on one line where there is room for them.
    names = max((len(row[0].text) for row in table.cells if row), default=0)
    width = len(table.columns) or max((len(row) for row in table.rows), default=0)
    for index in range(width):
        heading = one_line(table.columns[index]) if table.columns else ""
        whole = index == 0 and names <= look.width // 3
        justify: JustifyMethod = "right" if index in table.numbers else "left"
        made.add_column(heading, justify=justify, overflow="fold", no_wrap=whole)
    for row in table.cells[: table.most]:
        made.add_row(*(RichText(one_line(cell.text), _STYLES[cell.tone]) for cell in row))
    return made
