"""`sonde view RUN_OR_DIR...`: runs in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sonde.errors import MissingExtra, OptionError, RunNotFound

EXAMPLES = """
sonde view runs  # all runs in a folder
sonde view runs/first --port 8080 --no-browser  # over ssh -L 8080:localhost:8080
sonde view runs --host 0.0.0.0 --allow-others  # for colleagues; they need the token too
"""

Roots = Annotated[
    list[Path], typer.Argument(metavar="RUN_OR_DIR...", help="Runs, or folders with runs below.", show_default=False)
]
Port = Annotated[int | None, typer.Option("--port", min=0, max=65535, help="The port; 0 takes any that is free.")]
Host = Annotated[str, typer.Option("--host", help="Where to listen; by default only this machine gets through.")]
Others = Annotated[bool, typer.Option("--allow-others", help="Let other machines in; needed with their --host.")]
Names = Annotated[
    list[str] | None,
    typer.Option("--name", metavar="NAME", help="A further name that browsers use for it, as behind a proxy."),
]
NoBrowser = Annotated[bool, typer.Option("--no-browser", help="Print the address and open nothing.")]
Token = Annotated[
    str | None,
    typer.Option("--read-only-token", metavar="TOKEN", help="Use this token; by default a new one each time."),
]


def view(
    roots: Roots,
    port: Port = None,
    host: Host = "127.0.0.1",
    others: Others = False,
    name: Names = None,
    no_browser: NoBrowser = False,
    token: Token = None,
) -> None:
    """Show runs in the browser, live while they train.

    Findings, layers, samples, comparisons. Nothing leaves this machine. Whoever opens the page needs its token, can
    only read, and sees only the folders named here.
    """
    for root in roots:
        if not root.is_dir():
            raise RunNotFound(f"There is no folder {root}. Run: sonde view DIR, where DIR is a run or holds runs.")
    try:
        from sonde.views.web.serve import is_loopback, serve, take_place
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn", "anyio"):
            raise
        raise MissingExtra(error.name or "starlette", "view", "The viewer") from None
    if not is_loopback(host) and not others:
        raise OptionError(f"--host {host} lets other machines in. Add --allow-others if that is what you want.")
    place = take_place(host, port, token=token)

    def tell() -> None:
        typer.echo(f"Sonde shows {', '.join(map(str, roots))} at {place.url}\nPress Ctrl+C to stop.")
        if not no_browser:
            import webbrowser

            webbrowser.open(place.url)

    serve(roots, place, names=name or (), on_ready=tell)
