"""What is there instead of a run that was asked for."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Final

from sonde.store import layout

_MOST: Final = 4


def instead_of(path: Path) -> str:
    """Say what is at a path that is no run, or beside it; a sentence, or two."""
    if path.is_dir():
        inside = _runs_in(path)
        if inside:
            return f"It holds runs: {_listed(inside)}."
        return f"The folder has no {layout.HEADER}; a run is made by sonde.watch(model, run=...)."
    if not path.parent.is_dir():
        return f"There is no folder {path.parent} either."
    beside = _runs_in(path.parent)
    near = get_close_matches(path.name, beside, n=3)
    if near:
        return f"Nearest: {', '.join(str(path.parent / name) for name in near)}."
    return f"Runs beside it: {_listed(beside)}." if beside else ""


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return f"{', '.join(names[:_MOST])}{more}"


def _runs_in(folder: Path) -> list[str]:
    try:
        return sorted(child.name for child in folder.iterdir() if (child / layout.HEADER).is_file())
    except OSError:  # a folder that may not be listed has no hints to give
        return []
