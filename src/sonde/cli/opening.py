"""Open the run that a command names; arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sonde.errors import RunNotFound, SelectionError

if TYPE_CHECKING:
    from sonde.records import Site
    from sonde.store import Run


# --------------------------------------------------------------------------------
# Arguments and options that several verbs share, so that they read and behave the same.


def read_place(text: str) -> Path:
    """Return the folder that a command line names; for an address in an object store, where it can be read."""
    if "://" not in text:
        return Path(text)
    from sonde.store.remote.mirror import local_path

    return local_path(text)


RunPath = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="The folder of a run, or its address (s3://...).", show_default=False, parser=read_place
    ),
]
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
OneRank = Annotated[
    int | None, typer.Option("--rank", min=0, metavar="N", help="Only what rank N of several has recorded.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print strict JSON and nothing else.")]


# --------------------------------------------------------------------------------
# Opening the run that a command line names; if there is none, the error suggests what to run.


_MARKER = "run.json"


def open_run(path: Path, rank: int | None = None) -> Run:
    """Open a run, or one rank of it.

    Raises:
        OptionError: It has no such rank.
        RunNotFound: There is none; the message says what is there instead.

    """
    from sonde.store import open_run as open_stored

    require_run(path)
    return open_stored(path, rank=rank)


def require_run(path: Path) -> None:
    """Raise RunNotFound where there is no run; the message says what is there instead."""
    if not (path / _MARKER).is_file():
        from sonde.store.remote.mirror import is_mirrored, shown

        if is_mirrored(path):
            raise RunNotFound(f"There is no run at {shown(path)}.")
        raise RunNotFound(f"There is no run at {path}. {_what_instead(path)}")


def _what_instead(path: Path) -> str:
    from sonde.store.header import instead_of

    hint = instead_of(path)
    folder = path if path.is_dir() and hint.startswith("It holds") else path.parent
    command = "" if "Nearest" in hint or not folder.is_dir() or "has no" in hint else f"Run: sonde runs {folder}"
    return " ".join(part for part in (hint, command) if part)


def find_sites(run: Run, pattern: str | None) -> list[Site]:
    """Return the sites that match, or all.

    Raises:
        SelectionError: None matches.

    """
    if pattern is None:
        return [site for site in run.sites if site.same_as is None]
    if not pattern.strip():
        raise SelectionError("--site needs a key, a name, a glob or re:REGEX; it was empty. '*' means all.")
    return run.find(pattern)
