"""The listing of a taped step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sonde.analysis.step_outline import Node, outline
from sonde.core.tape import REASONS, Tape
from sonde.views.terminal.style import QUIET, TITLE, Look

DEPTH: Final = 3
"""Levels of modules that are shown if operations are folded."""
_MOST_ALIKE: Final = 24
"""Operations in a row, outside folded modules, that are shown one by one."""
_MOST_ROWS: Final = 10_000
_MOST_OF_A_FUNCTION: Final = 2


def print_tape(tape: Tape, console: Console, *, ops: bool = False) -> None:
    """Print a tape: batch, modules, loss, backward, optimizer, each with the user's line."""
    look = Look.of(console)
    about = f"{len(tape.ops):,} operations, taped as {REASONS[tape.reason]}"
    console.print(Text.assemble((f"step {tape.step}", TITLE), (f"  {about}", QUIET)))
    for note in (tape.truncated and f"cut short: {tape.truncated}", tape.incomplete):
        if note:
            console.print(Text(note, "yellow"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False, expand=True)
    table.add_column(ratio=1, overflow="ellipsis", no_wrap=True)
    table.add_column(overflow="ellipsis", no_wrap=True, max_width=26)
    table.add_column(justify="right", style=QUIET, no_wrap=True)
    last = ""
    lines = list(_lines(outline(tape), ops=ops))
    for depth, node in lines[:_MOST_ROWS]:
        line = str(tape.lines[node.line]) if node.line >= 0 else ""
        table.add_row(_title(node, depth, look), Text(node.result, QUIET), "" if line == last else line)
        last = line or last
    console.print(table)
    if len(lines) > _MOST_ROWS:
        console.print(Text(f"and {len(lines) - _MOST_ROWS:,} more lines; --json prints all", QUIET))


def _title(node: Node, depth: int, look: Look) -> Text:
    styles = {"module": "cyan", "backward": TITLE, "optimizer": TITLE, "value": "green", "event": QUIET}
    return Text("  " * depth + node.title, styles.get(node.kind, ""))


def _lines(nodes: list[Node], *, ops: bool, depth: int = 0) -> Iterator[tuple[int, Node]]:
    """Yield the lines to show with their depth. Backward and optimizer are folded unless operations are asked for."""
    for run in _runs(nodes):
        if not ops and len(run) > (_MOST_OF_A_FUNCTION if run[0].part_of else _MOST_ALIKE):
            yield depth, Node("event", f"{run[0].part_of or '…'}  ({len(run):,} operations)", line=run[0].line)
            continue
        for node in run:
            folded = not ops and (node.kind in ("backward", "optimizer") or depth >= DEPTH)
            inside = f"  ({node.count():,} operations)" if folded and node.children else ""
            yield depth, Node(node.kind, node.title + inside, node.result, node.line)
            if not folded:
                kept = node.children if ops or not _is_leaf(node) else []
                yield from _lines(kept, ops=ops, depth=depth + 1)


def _is_leaf(node: Node) -> bool:
    """Return whether a module is one of torch's own, or has no modules inside: its class shows what it does."""
    return node.kind == "module" and not any(each.kind == "module" for each in node.children)


def _runs(nodes: list[Node]) -> Iterator[list[Node]]:
    """Yield operations of one function that follow each other together, and everything else one by one."""
    run: list[Node] = []
    for node in nodes:
        if node.kind == "op" and (not run or run[0].part_of == node.part_of):
            run.append(node)
            continue
        if run:
            yield run
        run = [node] if node.kind == "op" else []
        if node.kind != "op":
            yield [node]
    if run:
        yield run
