"""`sonde mcp DIR`: serve runs to coding assistants."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sonde.errors import MissingExtra, RunNotFound

EXAMPLES = """
sonde mcp runs  # an assistant starts this itself, as its settings say
"""

Root = Annotated[Path, typer.Argument(metavar="DIR", help="A run, or a folder with runs below.")]


def mcp(root: Root = Path()) -> None:
    """Serve runs to coding assistants (Model Context Protocol).

    An assistant starts this command and talks to it over standard input and output. It can list runs, diagnose, explain
    a finding, read series and samples, and compare runs. It cannot change anything, nor read outside the folder.
    """
    if not root.is_dir():
        raise RunNotFound(f"There is no folder {root}. Run: sonde mcp DIR, where DIR is a run or holds runs.")
    try:
        from sonde.views.assistant import make_server

        server = make_server(root)
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "mcp", "mcp", "Serving runs to assistants") from None
    server.run("stdio")
