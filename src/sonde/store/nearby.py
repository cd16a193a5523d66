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
        inside = sorted(_runs_in(path))
        if inside:
            more = f" and {len(inside) - _MOST} more" if len(inside) > _MOST else ""
            return f"It holds runs: {', '.join(inside[:_MOST])}{more}."
        return f"The folder has no {layout.HEADER}; a run is made by sonde.watch(model, run=...)."
    if not path.parent.is_dir():
        return f"There is no folder {path.parent} either."
    near = get_close_matches(path.name, _runs_in(path.parent), n=3)
    return f"Nearest: {', '.join(str(path.parent / name) for name in near)}." if near else ""


def _runs_in(folder: Path) -> list[str]:
    try:
        return [child.name for child in folder.iterdir() if (child / layout.HEADER).is_file()]
    except OSError:  # a folder that may not be listed has no hints to give
        return []
