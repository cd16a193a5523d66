"""`sonde`: make and read runs from the command line.

Nothing heavy is imported before a verb needs it: `sonde --help` answers at once, and no verb but train and eval ever
imports torch.
"""

from __future__ import annotations

from typing import Annotated

import typer

from sonde.cli import (
    diagnose,
    evaluate,
    export,
    import_pages,
    query,
    replay,
    report,
    resume,
    runs,
    show,
    tail,
    top,
    train,
    verify,
    view,
)
from sonde.cli.guard import Verbs
from sonde.cli.help import Verb

_HELP = """See inside a neural network while it trains.

Runs are recorded in Python with sonde.watch, or by train and eval from a config. Most commands read runs, also while
they are written, on any machine and without torch.
"""

_EXAMPLES = """
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
    """Take the options that stand before a verb."""


app.command(cls=Verb, epilog=runs.EXAMPLES)(runs.runs)
app.command(cls=Verb, epilog=show.EXAMPLES)(show.show)
app.command(cls=Verb, epilog=diagnose.EXAMPLES)(diagnose.diagnose)
app.command(cls=Verb, epilog=tail.EXAMPLES)(tail.tail)
app.command(cls=Verb, epilog=top.EXAMPLES)(top.top)
app.command(cls=Verb, epilog=view.EXAMPLES)(view.view)
app.command(cls=Verb, epilog=report.EXAMPLES)(report.report)
app.command(cls=Verb, epilog=query.EXAMPLES)(query.query)
app.command(cls=Verb, epilog=export.EXAMPLES)(export.export)
app.command(cls=Verb, epilog=verify.EXAMPLES)(verify.verify)
app.command(cls=Verb, epilog=train.EXAMPLES)(train.train)
app.command(name="eval", cls=Verb, epilog=evaluate.EXAMPLES)(evaluate.evaluate)
app.command(cls=Verb, epilog=replay.EXAMPLES)(replay.replay)
app.command(cls=Verb, epilog=resume.EXAMPLES)(resume.resume)
app.command(name="import-pages", cls=Verb, epilog=import_pages.EXAMPLES)(import_pages.import_pages)


def run() -> None:
    """Run the command line: the entry point of the `sonde` command."""
    app(prog_name="sonde")
