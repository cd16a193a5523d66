"""Answers for programs: strict JSON on standard output, and nothing else there."""

from __future__ import annotations

import sys
from typing import IO, Any

from sonde import strict_json


def print_json(value: Any) -> None:
    """Print one JSON document, on one line; what is not a finite number is null."""
    utf8_output().write(strict_json.text(value) + "\n")


def utf8_output() -> IO[str]:
    """Return standard output, which writes UTF-8 from now on whatever the locale says: programs expect nothing else."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        # A file name that is not valid UTF-8 is written as its original bytes.
        reconfigure(encoding="utf-8", errors="surrogateescape")
    return sys.stdout
