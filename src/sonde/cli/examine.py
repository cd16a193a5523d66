"""`sonde examine RUN`: repeat a taped step with one thing changed at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from sonde.cli.answer import print_json
from sonde.cli.opening import AsJson, RunPath, Width, require_run

if TYPE_CHECKING:
    from sonde.core.examination import Examination

EXAMPLES = """
sonde examine runs/first  # all experiments on the last tape
sonde examine runs/first --step 3  # on the tape of step 3
sonde examine runs/first --only learnability  # one experiment
sonde examine runs/first --json | jq .results  # for programs
"""

Step = Annotated[int | None, typer.Option("--step", metavar="N", help="The step whose tape is examined; the last one.")]
Only = Annotated[list[str] | None, typer.Option("--only", metavar="NAME", help="Run this experiment; may be repeated.")]


def examine(run: RunPath, step: Step = None, only: Only = None, width: Width = None, json: AsJson = False) -> None:
    """Repeat a taped step with one thing changed at a time.

    Reports what each change did. Runs in a process of its own on the CPU, with low priority, for a minute at most.
    Needs torch, and none of the program's code. `sonde diagnose` reads the results.
    """
    from sonde.core import examination, tape

    require_run(run)
    found = examination.examine(tape.find(run, step), only=only or ())
    if json:
        print_json(examination.to_plain(found))
    else:
        _print(found, width)


def _print(found: Examination, width: int | None) -> None:
    from rich.padding import Padding
    from rich.text import Text

    from sonde.views.terminal import make_console
    from sonde.views.terminal.style import TITLE

    console = make_console(width=width)
    console.print(Text(f"step {found.step}, {found.seconds:.1f} s", TITLE))
    if found.note:
        console.print(Text(found.note))
    for result in found.results:
        console.print(Text.assemble((result.experiment.replace("_", " "), "bold"), f": {result.changes}"))
        text = f"not run: {result.skipped}" if result.skipped else result.said
        console.print(Padding(Text(text), (0, 0, 0, 2)))
