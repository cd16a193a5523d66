"""`sonde tape RUN`: what one step computed, operation by operation."""

from __future__ import annotations

from typing import Annotated

import typer

from sonde.cli.answer import print_text
from sonde.cli.opening import AsJson, RunPath, Width, open_run

EXAMPLES = """
sonde tape runs/first  # the last taped step, folded by module
sonde tape runs/first --step 3  # another one
sonde tape runs/first --ops  # every operation
sonde tape runs/first --json | jq .ops  # for programs
"""

Step = Annotated[int | None, typer.Option("--step", metavar="N", help="The taped step; by default the last one.")]
Ops = Annotated[bool, typer.Option("--ops", help="Show every operation, also inside modules, backward and optimizer.")]


def tape(run: RunPath, step: Step = None, ops: Ops = False, width: Width = None, json: AsJson = False) -> None:
    """Show what one step computed, by module and line.

    From the batch through modules and loss to backward and optimizer. A few steps of every run are taped: early ones,
    and one when something is found. With --json the whole tape.
    """
    found = open_run(run).tape(step)
    if json:
        import msgspec

        found.folder = ""
        print_text(msgspec.json.encode(found).decode() + "\n")
        return
    from sonde.views.terminal import make_console
    from sonde.views.terminal.tape import print_tape

    print_tape(found, make_console(width=width), ops=ops)
