"""Opening the run that a command line names, with an error that leads on when there is none."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from sonde.errors import RunNotFound, SelectionError

if TYPE_CHECKING:
    from sonde.records import Site
    from sonde.store import Run

_MARKER = "run.json"


def open_run(path: Path) -> Run:
    """Open a run.

    Raises:
        RunNotFound: There is none; the message says what is there instead.

    """
    from sonde.store import open_run as open_stored

    require_run(path)
    return open_stored(path)


def require_run(path: Path) -> None:
    """Raise RunNotFound where there is no run; the message says what is there instead."""
    if not (path / _MARKER).is_file():
        raise RunNotFound(f"There is no run at {path}. {_what_instead(path)}")


def _what_instead(path: Path) -> str:
    if path.is_dir():
        inside = sorted(child.name for child in path.iterdir() if (child / _MARKER).is_file())
        if inside:
            return f"It holds runs: {_few(inside)}. Run: sonde runs {path}"
        return f"The folder has no {_MARKER}; a run is made by sonde.watch(model, run=...)."
    parent = path.parent
    runs = [child.name for child in parent.iterdir() if (child / _MARKER).is_file()] if parent.is_dir() else []
    near = get_close_matches(path.name, runs, n=3)
    if near:
        return f"Nearest: {', '.join(str(parent / name) for name in near)}."
    return f"Run: sonde runs {parent}" if parent.is_dir() else f"There is no folder {parent} either."


def _few(names: list[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


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
