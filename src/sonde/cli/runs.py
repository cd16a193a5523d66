"""`sonde runs DIR`: the runs in a folder."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sonde.cli.answer import print_json
from sonde.cli.opening import AsJson, Width, read_place
from sonde.errors import RunNotFound

if TYPE_CHECKING:
    from rich.table import Table

    from sonde.store import RunSummary
    from sonde.store.header import Labels

EXAMPLES = """
sonde runs  # in the current folder
sonde runs runs --json
"""

Folder = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="A folder with runs in it, or below it; also s3://...", parser=read_place),
]


def runs(folder: Folder = Path(), width: Width = None, json: AsJson = False) -> None:
    """List the runs in a folder, and what is wrong with each."""
    from sonde.store import list_runs
    from sonde.store.remote.mirror import shown

    if not folder.is_dir() and shown(folder) == str(folder):
        raise RunNotFound(f"There is no folder {folder}. Run: sonde runs DIR, where DIR holds runs.")
    found = list_runs(folder)
    if json:
        print_json({"folder": shown(folder), "runs": [_describe(run) for run in found]})
        return
    from sonde.views.terminal import make_console

    console = make_console(width=width)
    if not found:
        console.print(f"No runs in {shown(folder)}. One is made by: sonde.watch(model, optimizer, run='runs/first')")
        return
    console.print(_table(found, folder, time.time()))


def _describe(run: RunSummary) -> dict[str, object]:
    from sonde.analysis.sweep import read_troubles

    labels = _labels(run)
    return {
        "path": run.address,
        "status": run.status,
        "model": run.model,
        "steps": run.steps,
        "last_step": run.last_step,
        "last_loss": run.last_loss,
        "attempts": run.attempts,
        "created": run.created,
        "updated": run.updated,
        "problem": run.problem,
        "findings": [asdict(each) for each in read_troubles(run)],
        "tags": list(labels.tags),
        "note": labels.note,
    }


def _labels(run: RunSummary) -> Labels:
    from sonde.store.header import Labels, read_header, read_labels

    if run.problem:
        return Labels()
    user = read_header(run.path).config.get("user")
    return read_labels(run.path, user if isinstance(user, dict) else {})


def _table(found: list[RunSummary], folder: Path, now: float) -> Table:
    from rich.text import Text

    from sonde.analysis.sweep import read_troubles
    from sonde.views.terminal.runs_table import troubles_text
    from sonde.views.terminal.style import ABSENT, BAD, STATUS_STYLES, short
    from sonde.views.terminal.tables import plain_table

    headings = ("run", "status", "step", "loss", "findings", "started", "model")
    table = plain_table(*headings, right=("step", "loss", "started"))
    table.columns[0].overflow = "fold"  # a long name takes several lines, and no room from the other columns
    for column in table.columns[1:6]:
        column.no_wrap = column.header != "findings"
    for run in found:
        name = str(run.path.relative_to(folder)) if run.path != folder else run.address
        started = ABSENT if run.created is None else _ago(now - run.created)
        style = STATUS_STYLES[run.status]
        if run.problem:
            table.add_row(Text(name), Text("damaged", BAD), "", "", Text(run.problem, BAD), started, "")
            continue
        step = ABSENT if run.last_step is None else f"{run.last_step:,}"
        loss = Text(short(run.last_loss), "" if run.last_loss is None or math.isfinite(run.last_loss) else BAD)
        found_wrong = troubles_text(read_troubles(run))
        named = Text(" ".join((name, *(f"#{tag}" for tag in _labels(run).tags))))
        table.add_row(named, Text(run.status, style), step, loss, found_wrong, Text(started, "dim"), Text(run.model))
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
