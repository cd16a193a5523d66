"""A pause that another process can end: a file that exists as long as the training waits."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from sonde.core import files
from sonde.errors import RunNotFound

logger = logging.getLogger("sonde")

PAUSED: Final = "paused.json"
_LOOK_EVERY_S: Final = 0.2


def pause(run: Path, step: int, reason: str, sleep: Callable[[float], None] = time.sleep) -> None:
    """Wait until the run's pause file is deleted: by `sonde resume RUN`, by `resume_run`, or by hand."""
    path = run / PAUSED
    files.write(path, {"pid": os.getpid(), "step": step, "reason": reason, "since": time.time()}, sync=False)
    logger.warning("training is paused at step %d (%s). To go on: sonde resume %s", step, reason, run)
    while path.exists():
        sleep(_LOOK_EVERY_S)


def resume_run(run: str | Path) -> dict[str, Any] | None:
    """Resume a paused training; return what it noted about its pause, or None if it was not paused.

    Raises:
        RunNotFound: There is no run at the path.

    """
    folder = Path(run)
    if not (folder / "run.json").is_file():
        raise RunNotFound(f"{folder} holds no run.")
    path = folder / PAUSED
    try:
        noted = files.read_object(path)
    except FileNotFoundError:
        return None
    path.unlink(missing_ok=True)
    return noted
