"""`sonde ranks RUN`: what every rank of a run is doing, and which one the others wait for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sonde.cli.answer import print_json
from sonde.cli.diagnose import exit_code
from sonde.cli.opening import AsJson, RunPath, Width, require_run

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import RenderableType

    from sonde.analysis.ranks import RankPage, RankRow
    from sonde.records import Severity
    from sonde.views.terminal import Look

EXAMPLES = """
sonde ranks runs/first  # a line per rank, those in trouble first
sonde ranks runs/first --watch  # live, until Ctrl-C
sonde ranks runs/first --stacks  # with the Python stacks of stuck ranks
sonde ranks runs/first --json | jq .findings  # for programs
"""

Watch = Annotated[bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C.")]
Interval = Annotated[float, typer.Option("--interval", min=0.1, metavar="SECONDS", help="Time between updates.")]
Rows = Annotated[int, typer.Option("--rows", min=0, metavar="N", help="Show at most N ranks; 0 shows all.")]
Stacks = Annotated[bool, typer.Option("--stacks", help="Print the stacks that stuck ranks have written.")]


def ranks(
    run: RunPath,
    watch: Watch = False,
    interval: Interval = 1.0,
    rows: Rows = 32,
    stacks: Stacks = False,
    width: Width = None,
    json: AsJson = False,
) -> None:
    """Show what every rank is doing, and which one is slow, stuck or dead.

    A line per rank: last step, state, phase, time without progress, its own time per step, how long it waits for the
    others, its score (the usual rank's time over its own: below 1 is slow), memory and device. Exits with 1 if a rank
    is slow and with 2 if one is stuck or dead, or costs a quarter of the time.
    """
    from sonde.analysis.ranks import read_ranks
    from sonde.views.terminal import Look, make_console

    require_run(run)
    page = read_ranks(run)
    if json:
        print_json(describe_ranks(run, page))
    else:
        console = make_console(width=width)
        look = Look.of(console)
        if watch:
            _watch(run, page, look, rows, interval)
            return
        console.print(_draw(run, page, look, rows))
        if stacks:
            _print_stacks(run, page, look)
    code = exit_code(_gravest(page))
    if code:
        raise typer.Exit(code)


def _gravest(page: RankPage) -> Severity | None:
    from sonde.records import SEVERITIES

    return max((finding.severity for finding in page.findings), key=SEVERITIES.index, default=None)


def describe_ranks(run: Path, page: RankPage) -> dict[str, Any]:
    """Describe all ranks as JSON-ready values."""
    return {
        "run": str(run),
        "ranks": [describe_rank(row) for row in page.rows],
        "findings": [finding.to_json() for finding in page.findings],
    }


def describe_rank(row: RankRow) -> dict[str, Any]:
    """Describe one rank as JSON-ready values."""
    return {
        "rank": row.rank,
        "condition": row.condition,
        "still_s": row.still_s,
        "beat": row.beat,
        "score": row.score,
        "phases": row.phases,
    }


def _draw(run: Path, page: RankPage, look: Look, most: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from sonde.views.terminal.ranks import rank_summary, rank_table

    if not page.rows:
        return Text(f"{run.name} has no heartbeats: they are written when several ranks train together.")
    parts: list[RenderableType] = [rank_summary(page)]
    parts += [Text(f"{finding.severity}: {finding.cause}", "bold red") for finding in page.findings]
    shown = page.worst_first()
    rows = shown[:most] if most else shown
    parts.append(rank_table(rows, look))
    if len(rows) < len(shown):
        parts.append(Text(f"and {len(shown) - len(rows)} more ranks; --rows 0 shows all", "dim"))
    return Group(*parts)


def _print_stacks(run: Path, page: RankPage, look: Look) -> None:
    from rich.text import Text

    from sonde.store.ranks import stacks_of
    from sonde.views.terminal import make_console

    console = make_console(width=look.width)
    for row in page.worst_first():
        text = stacks_of(run, row.rank) if row.beat is not None and row.beat.stacks else ""
        if text:
            console.print(Text(f"rank {row.rank}", "bold"))
            console.print(Text(text), soft_wrap=True)


def _watch(run: Path, page: RankPage, look: Look, rows: int, interval: float) -> None:
    from rich.live import Live

    from sonde.analysis.ranks import read_ranks
    from sonde.views.terminal import make_console

    console = make_console()
    try:
        with Live(_draw(run, page, look, rows), console=console, auto_refresh=False) as live:
            while page.standing is not None and any(row.condition != "ended" for row in page.rows):
                time.sleep(interval)
                page = read_ranks(run)
                live.update(_draw(run, page, look, rows), refresh=True)
    except KeyboardInterrupt:
        raise typer.Exit from None
