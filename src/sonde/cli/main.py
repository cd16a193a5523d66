"""`sonde`: make and read runs from the command line.

Nothing heavy is imported before a verb needs it: `sonde --help` answers at once, and only train, eval and version
--verbose import torch (the script that run starts does so itself).
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from sonde.cli import (
    compare,
    diagnose,
    evaluate,
    examine,
    export,
    fleet,
    import_pages,
    logs,
    mcp,
    note,
    push,
    query,
    ranks,
    replay,
    report,
    resume,
    runs,
    show,
    tail,
    tape,
    top,
    train,
    verify,
    version,
    view,
)
from sonde.cli import run as run_script
from sonde.cli.guard import Verbs
from sonde.cli.help import Verb

_HELP = """See inside a neural network while it trains.

Runs are recorded from any script, in Python with sonde.watch, or from a config. Most commands read
runs, also while they are written, on any machine and without torch.
"""

_EXAMPLES = """
sonde run train.py --lr 1e-3  # record a script as it is
sonde runs  # all runs below this folder
sonde diagnose runs/first  # what is wrong, and the fix
sonde show runs/first  # how it went, worst layers first
sonde show runs/first --site '*:gradient'  # every gradient
sonde tail runs/first  # follow a run that is training
sonde show runs/first --json | jq .layers  # for programs
"""

app = typer.Typer(
    name="sonde",
    cls=Verbs,
    help=_HELP,
    epilog=_EXAMPLES,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from sonde.version import VERSION

        typer.echo(f"sonde {VERSION}")
        raise typer.Exit


@app.callback(help=_HELP)
def sonde(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take the options that come before a verb."""


app.command(cls=Verb, epilog=runs.EXAMPLES)(runs.runs)
app.command(cls=Verb, epilog=show.EXAMPLES)(show.show)
app.command(cls=Verb, epilog=diagnose.EXAMPLES)(diagnose.diagnose)
app.command(cls=Verb, epilog=examine.EXAMPLES)(examine.examine)
app.command(cls=Verb, epilog=tail.EXAMPLES)(tail.tail)
app.command(cls=Verb, epilog=logs.EXAMPLES)(logs.logs)
app.command(cls=Verb, epilog=tape.EXAMPLES)(tape.tape)
app.command(cls=Verb, epilog=top.EXAMPLES)(top.top)
app.command(cls=Verb, epilog=compare.EXAMPLES)(compare.compare)
app.command(cls=Verb, epilog=ranks.EXAMPLES)(ranks.ranks)
app.command(cls=Verb, epilog=view.EXAMPLES)(view.view)
app.command(cls=Verb, epilog=mcp.EXAMPLES)(mcp.mcp)
app.command(cls=Verb, epilog=report.EXAMPLES)(report.report)
app.command(cls=Verb, epilog=query.EXAMPLES)(query.query)
app.command(cls=Verb, epilog=export.EXAMPLES)(export.export)
app.command(cls=Verb, epilog=fleet.EXAMPLES)(fleet.fleet)
app.command(cls=Verb, epilog=verify.EXAMPLES)(verify.verify)
app.command(cls=Verb, epilog=push.EXAMPLES)(push.push)
app.command(cls=Verb, epilog=version.EXAMPLES)(version.version)
app.command(cls=Verb, epilog=note.EXAMPLES)(note.note)
app.command(cls=run_script.ScriptVerb, epilog=run_script.EXAMPLES)(run_script.run)
app.command(cls=Verb, epilog=train.EXAMPLES)(train.train)
app.command(name="eval", cls=Verb, epilog=evaluate.EXAMPLES)(evaluate.evaluate)
app.command(cls=Verb, epilog=replay.EXAMPLES)(replay.replay)
app.command(cls=Verb, epilog=resume.EXAMPLES)(resume.resume)
app.command(name="import-pages", cls=Verb, epilog=import_pages.EXAMPLES)(import_pages.import_pages)


def run() -> None:
    """Run the command line: the entry point of the `sonde` command."""
    hook = sys.excepthook
    start_script = app(prog_name="sonde")  # exits, unless there is a script to run
    sys.excepthook = hook  # Typer has put its own there
    start_script()
