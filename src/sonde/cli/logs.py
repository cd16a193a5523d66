"""`sonde logs RUN`: what the program printed, the code that ran, and where."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sonde.cli.answer import print_json
from sonde.cli.opening import AsJson, RunPath, require_run
from sonde.errors import escaped

if TYPE_CHECKING:
    from sonde.store.logs import Output, SourceFile

EXAMPLES = """
sonde logs runs/first  # what it printed
sonde logs runs/first --tail 20  # the last lines
sonde logs runs/first --code  # the source files as they were
sonde logs runs/first --environment  # versions, commit, command line
"""

Tail = Annotated[int, typer.Option("--tail", min=0, metavar="N", help="Only the last N lines; 0 prints all.")]
Code = Annotated[bool, typer.Option("--code", help="Print the source files that were kept.")]
Environment = Annotated[bool, typer.Option("--environment", help="Print versions, commit and command line.")]

_MISSING = "Nothing of it was kept. Record with sonde.watch(logs=True), or: sonde run -o logs=true train.py"


def logs(
    run: RunPath, tail: Tail = 0, code: Code = False, environment: Environment = False, json: AsJson = False
) -> None:
    """Print what a program printed, its code, or its environment."""
    from sonde.store.header import read_header
    from sonde.store.logs import read_code, read_output

    require_run(run)
    output, sources, facts = read_output(run), read_code(run), read_header(run).environment
    if json:
        print_json(_describe(output, sources, facts))
        return
    if environment:
        for name, value in facts.items():
            _echo(f"{name}: {value}")
    if code:
        _print_code(sources)
    if not environment and not code:
        _print_output(output, tail)


def _describe(output: Output | None, sources: list[SourceFile], facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "output": None if output is None else asdict(output),
        "code": [asdict(each) for each in sources],
        "environment": facts,
    }


def _print_code(sources: list[SourceFile]) -> None:
    for each in sources:
        _echo(f"# {each.path}{' (its beginning)' if each.is_cut else ''}")
        _echo(each.text)
    if not sources:
        typer.echo(_MISSING)


def _print_output(output: Output | None, tail: int) -> None:
    if output is None:
        typer.echo(_MISSING)
        return
    first = len(output.lines) - tail if tail else 0
    for number, line in enumerate(output.lines):
        if number == output.cut and number >= first:
            typer.echo("… some lines were not kept …")
        if number >= first:
            _echo(line.text)


def _echo(text: str) -> None:
    """Print a text of a file, which a terminal must not obey."""
    typer.echo(escaped(text))
