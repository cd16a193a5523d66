"""`sonde verify RUN`: check every file of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from sonde.cli.answer import print_json
from sonde.cli.guard import FOUND
from sonde.cli.opening import AsJson, RunPath, require_run

if TYPE_CHECKING:
    from sonde.store import Problem, Report

EXAMPLES = """
sonde verify runs/first
sonde verify runs/first --json
"""


def verify(run: RunPath, json: AsJson = False) -> None:
    """Check every checksum of a run and report what is damaged.

    A torn tail is the end of a record that a crash cut off. It is reported, but is not damage: everything before it is
    whole. Exits with 1 when something is damaged.
    """
    from sonde.store import verify as check

    require_run(run)
    report = check(run)
    if json:
        print_json(_describe(report))
    else:
        _print(report)
    if not report.ok:
        raise typer.Exit(FOUND)


def _describe(report: Report) -> dict[str, object]:
    def entries(found: list[Problem]) -> list[dict[str, object]]:
        return [{"file": str(problem.file), "what": problem.what, "offset": problem.offset} for problem in found]

    return {
        "run": str(report.path),
        "ok": report.ok,
        "files": report.num_files,
        "blocks": report.num_blocks,
        "captures": report.num_captures,
        "problems": entries(report.problems),
        "torn_tails": entries(report.torn_tails),
        "notes": report.notes,
    }


def _print(report: Report) -> None:
    from rich.text import Text

    from sonde.store.remote.mirror import shown
    from sonde.views.terminal import Look, make_console
    from sonde.views.terminal.style import plural

    console = make_console()
    look = Look.of(console)
    lines = [Text.assemble((look.pick("✗ ", "x "), "bold red"), str(problem)) for problem in report.problems]
    lines += [Text.assemble((look.pick("· ", ". "), "dim"), f"torn tail: {tail}") for tail in report.torn_tails]
    lines += [Text(note, "dim") for note in report.notes]
    scope = f"{plural(report.num_files, 'file')}, {plural(report.num_blocks, 'block')}"
    if report.num_captures:
        scope += f", {plural(report.num_captures, 'capture')}"
    if report.ok:
        good = f"{shown(report.path)}: every checksum is right, {scope}"
        lines.append(Text.assemble((look.pick("✓ ", "+ "), "green"), good))
    else:
        damaged = f"{shown(report.path)}: {len(report.problems)} damaged; {scope} are whole and can be read"
        lines.append(Text(damaged, "bold red"))
    for line in lines:
        console.print(line, soft_wrap=True)
