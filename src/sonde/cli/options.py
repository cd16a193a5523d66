"""Arguments and options that several verbs share, so that they read and behave the same."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)]
SiteGlob = Annotated[
    str | None,
    typer.Option(
        "--site",
        metavar="GLOB",
        help="Only matching sites (measured tensors and scalars): a name, a glob, or re:REGEX.",
    ),
]
StatName = Annotated[str | None, typer.Option("--stat", metavar="NAME", help="The statistic: {statistics}.")]
LastSteps = Annotated[int | None, typer.Option("--last", min=1, metavar="N", help="Only the last N steps.")]
Width = Annotated[
    int | None, typer.Option("--width", min=40, metavar="COLUMNS", help="Width of the output in characters.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print strict JSON and nothing else.")]
