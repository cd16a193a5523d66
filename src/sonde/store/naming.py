"""The name of a run: as it stands, or with a number, so that a program can be started again as it is."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from sonde.errors import OptionError

STAR = "*"


def place_of(run: str | os.PathLike[str], *, resume: bool = False, shared: bool = False) -> Path:
    """Return the folder of a run. A star in its last part becomes the next number; to resume, the highest there is.

    Args:
        run: The folder as the user named it.
        resume: Whether a run that exists is to be continued.
        shared: Whether several processes write the run, and so have to know its name beforehand.

    Raises:
        OptionError: The star stands where it cannot be replaced.

    """
    given: Any = run
    if not isinstance(given, str | os.PathLike) or not str(given).strip():
        raise OptionError(f'run takes the folder to write, such as "runs/first"; got {run!r:.80}.')
    path = Path(run)
    if STAR not in str(path):
        return path
    if STAR in str(path.parent) or path.name.count(STAR) > 1:
        raise OptionError(f"run={str(path)!r}: one star can stand for a number, in the last part of the path.")
    if shared:
        raise OptionError(
            f"run={str(path)!r}: the ranks of a distributed training write one run, and each would count for itself. "
            "Name the run without a star."
        )
    before, after = path.name.split(STAR)
    last = max(_numbers(path.parent, before, after), default=0)
    return path.with_name(f"{before}{max(1, last) if resume else last + 1}{after}")


def _numbers(folder: Path, before: str, after: str) -> list[int]:
    pattern = re.compile(f"{re.escape(before)}([0-9]+){re.escape(after)}")
    names = (child.name for child in folder.iterdir()) if folder.is_dir() else ()
    return [int(found[1]) for name in names if (found := pattern.fullmatch(name))]
