"""`sonde replay BUNDLE --model MODULE:FUNCTION`: repeat a step that went non-finite."""

from __future__ import annotations

import sys
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sonde.cli.answer import print_json
from sonde.cli.guard import FOUND
from sonde.cli.opening import AsJson
from sonde.errors import MissingExtra, OptionError, SondeError

if TYPE_CHECKING:
    from rich.console import Console

EXAMPLES = """
sonde replay runs/first/bundles/step-000123 --model mymodule:build
sonde replay runs/first --model mymodule:build  # its last bundle
sonde replay runs/first --model mymodule:Net --json
"""

BundlePath = Annotated[
    Path, typer.Argument(metavar="BUNDLE", help="The folder of a bundle, or of a run with bundles.", show_default=False)
]
Model = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="MODULE:NAME",
        help="What builds the model: a function or class without arguments, or a module object.",
        show_default=False,
    ),
]


def replay(bundle: BundlePath, model: Model, json: AsJson = False) -> None:
    """Repeat a step that went non-finite, and name the operation.

    Runs your code. The model that MODULE:NAME builds gets the weights, the batch and the random numbers of that step.
    Exits with 0 when the operation was confirmed, with 1 when it was not.
    """
    try:
        import_module("torch")
    except ImportError as error:
        raise MissingExtra("torch", "torch", "Replaying a step") from error
    opened = import_module("sonde.forensics.bundle").load_bundle(bundle)
    outcome = opened.replay(_find(model))
    if json:
        print_json(outcome.to_json())
    else:
        _print(outcome)
    if not outcome.confirmed:
        raise typer.Exit(FOUND)


def _find(text: str) -> Any:
    """Import what `MODULE:NAME` names; modules in the current folder are found, as for a script."""
    module_name, _, name = text.partition(":")
    if not module_name or not name:
        raise OptionError(f"--model {text!r}: write MODULE:NAME, such as mymodule:build.")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise OptionError(f"--model {text!r}: {module_name} cannot be imported from here: {error}.") from error
    except SondeError as error:
        raise OptionError(
            f"--model {text!r}: importing {module_name} records a run, and that failed: {error} "
            f"Put what trains under: if __name__ == '__main__':"
        ) from error
    try:
        return getattr(module, name)
    except AttributeError as error:
        near = get_close_matches(name, vars(module), n=3)
        hint = f" (nearest: {', '.join(near)})" if near else ""
        raise OptionError(f"--model {text!r}: there is no {name} in {module_name}{hint}.") from error


def _print(outcome: Any) -> None:
    from rich.text import Text

    from sonde.views.terminal import Look, make_console

    console = make_console()
    look = Look.of(console)
    if outcome.confirmed:
        head = Text.assemble((look.pick("✓ ", "+ "), "green"), f"step {outcome.bundle.step}: confirmed")
    else:
        head = Text.assemble((look.pick("✗ ", "x "), "bold red"), f"step {outcome.bundle.step}: not confirmed")
    same = {True: ", outputs bit-identical", False: ", outputs differ", None: ""}[outcome.identical]
    console.print(head.append(same, "dim"))
    finding = outcome.finding
    if finding is not None:
        _print_finding(console, finding.cause, finding.fix)
    elif outcome.bundle.finding is not None:
        console.print(Text(f"Recorded was: {outcome.bundle.finding.cause}"))
        console.print(Text("In the repetition everything is finite.", "dim"))


def _print_finding(console: Console, cause: str, fix: str) -> None:
    from rich.text import Text

    console.print(Text(cause))
    console.print(Text(fix, "cyan"))
