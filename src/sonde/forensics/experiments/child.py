"""The process that examines a tape: `python -m sonde.forensics.experiments.child FOLDER`. It limits itself first."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
from pathlib import Path
from typing import Final

MEMORY: Final = 8 << 30
"""Bytes of data that the process may hold."""


def main(arguments: list[str] | None = None) -> None:
    """Examine the tape in a folder and write the results beside it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", action="append")
    options = parser.parse_args(arguments)
    from sonde.core import examination

    limit(examination.BUSY * options.seconds + examination.GRACE)

    from sonde.forensics.experiments import examine_folder

    found = examine_folder(options.folder, only=options.only, seconds=options.seconds)
    examination.write(options.folder, found)


def limit(seconds: float) -> None:
    """Give way to everything else, and end after a time however long an operation takes."""
    with contextlib.suppress(OSError, AttributeError):
        os.nice(19)
    with contextlib.suppress(OSError, AttributeError):  # on Linux: only where a processor would be idle
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)


if __name__ == "__main__":
    main()
