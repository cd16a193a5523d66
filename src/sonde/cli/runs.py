"""`sonde runs DIR`: the runs in a folder."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sonde.cli.opening import AsJson, Width
from sonde.errors import RunNotFound

if TYPE_CHECKING:
    from rich.table import Table

    from sonde.store import RunSummary

EXAMPLES = """
sonde runs  # in the current folder
sonde runs runs --json
"""

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A folder with runs in it, or below it.")]


def runs(folder: Folder = Path(), width: Width = None, json: AsJson = False) -> None:
    """List the runs in a folder, the newest first."""
    from sonde.store import list_runs

    if not folder.is_dir():
        raise RunNotFound(f"There is no folder {folder}. Run: sonde runs DIR, where DIR holds runs.")
    found = list_runs(folder)
    if json:
        from sonde.cli.answer import print_json

        print_json({"folder": str(folder), "runs": [_describe(run) for run in found]})
        return
    from sonde.views.terminal import make_console

    console = make_console(width=width)
    if not found:
        console.print(f"No runs in {folder}. One is made by: sonde.watch(model, optimizer, run='runs/first')")
        return
    console.print(_table(found, folder, time.time()))


def _describe(run: RunSummary) -> dict[str, object]:
    return {
        "path": str(run.path),
        "status": run.status,
        "model": run.model,
        "steps": run.steps,
        "last_step": run.last_step,
        "last_loss": run.last_loss,
        "attempts": run.attempts,
        "created": run.created,
        "updated": run.updated,
        "problem": run.problem,
    }


def _table(found: list[RunSummary], folder: Path, now: float) -> Table:
    from rich.text import Text

    from sonde.views.terminal.style import ABSENT, BAD, STATUS_STYLES, short
    from sonde.views.terminal.tables import plain_table

    table = plain_table("run", "status", "step", "loss", "started", "model", right=("step", "loss", "started"))
    table.columns[0].no_wrap, table.columns[0].overflow = True, "ellipsis"
    for run in found:
        name = str(run.path.relative_to(folder)) if run.path != folder else str(run.path)
        started = ABSENT if run.created is None else _ago(now - run.created)
        style = STATUS_STYLES[run.status]
        if run.problem:
            table.add_row(Text(name), Text("damaged", BAD), "", "", started, Text(run.problem, BAD))
            continue
        step = ABSENT if run.last_step is None else f"{run.last_step:,}"
        loss = Text(short(run.last_loss), "" if run.last_loss is None or math.isfinite(run.last_loss) else BAD)
        table.add_row(Text(name), Text(run.status, style), step, loss, Text(started, "dim"), Text(run.model))
    return table


def _ago(seconds: float) -> str:
    """Write how long ago something was, in one unit.

    >>> [_ago(s) for s in (5, 200, 9000, 300_000)]
    ['just now', '3 min ago', '2 h ago', '3 d ago']
    """
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit} ago"
    return "just now"
