"""`sonde view RUN_OR_DIR...`: show runs in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sonde.cli.opening import read_place
from sonde.errors import MissingExtra, OptionError, RunNotFound

EXAMPLES = """
sonde view runs  # all runs in a folder
sonde view runs/first --port 8080 --no-browser  # over ssh -L 8080:localhost:8080
sonde view runs --host 0.0.0.0 --allow-others  # for colleagues; they need the token too
"""

Roots = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN_OR_DIR...",
        help="Runs, or folders with runs below; also s3://...",
        show_default=False,
        parser=read_place,
    ),
]
Port = Annotated[int | None, typer.Option("--port", min=0, max=65535, help="The port; 0 picks a free one.")]
Host = Annotated[
    str, typer.Option("--host", help="The address to listen on; by default only this machine can connect.")
]
Others = Annotated[
    bool, typer.Option("--allow-others", help="Let other machines connect; required when --host is not this machine.")
]
Names = Annotated[
    list[str] | None,
    typer.Option("--name", metavar="NAME", help="Another host name that browsers use, for example behind a proxy."),
]
NoBrowser = Annotated[bool, typer.Option("--no-browser", help="Print the address without opening a browser.")]
Token = Annotated[
    str | None,
    typer.Option("--read-only-token", metavar="TOKEN", help="The access token; by default a new one each time."),
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

    Findings, layers, samples, comparisons. Nothing leaves this machine. The pages are read-only, need the token in the
    printed address, and show only the folders named here.
    """
    from sonde.store.remote.mirror import shown

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
        raise OptionError(f"--host {host} lets other machines connect. Add --allow-others if that is what you want.")
    place = take_place(host, port, token=token)

    def announce() -> None:
        typer.echo(f"Sonde shows {', '.join(map(shown, roots))} at {place.url}\nPress Ctrl+C to stop.")
        if not no_browser:
            import webbrowser

            webbrowser.open(place.url)

    serve(roots, place, names=name or (), on_ready=announce)
