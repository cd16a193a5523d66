"""Where logs go, checked: the folder, and the name that files in it begin with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sonde.errors import OptionError


def made_folder(log_dir: Any) -> Path:
    """Return the folder, which is made if it is not there."""
    if not isinstance(log_dir, str | os.PathLike):
        raise OptionError(f"log_dir takes a path; got {log_dir!r}.")
    folder = Path(log_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise OptionError(f"log_dir={str(folder)!r} is no folder: a file is in the way. Choose another.") from None
    except OSError as error:
        raise OptionError(f"log_dir={str(folder)!r} cannot be made: {error.strerror}. Choose another.") from None
    return folder


def checked_name(name: Any) -> str:
    """Return the name of an experiment; empty if there is none.

    >>> checked_name("digits"), checked_name(None)
    ('digits', '')
    """
    if name is not None and (not isinstance(name, str) or Path(name).name != name):
        raise OptionError(
            f"experiment_name takes a plain name, such as 'digits'; got {name!r:.80}. Folders are chosen by log_dir "
            "and checkpoint_dir."
        )
    return name or ""
