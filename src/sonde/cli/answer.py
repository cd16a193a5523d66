"""Answers for programs: strict JSON on standard output, and nothing else there."""

from __future__ import annotations

import json
import sys
from typing import Any

from sonde.views.plain import plain


def to_json(value: Any) -> str:
    """Write a value as JSON that any parser takes; what is not a finite number is null."""
    return json.dumps(plain(value), allow_nan=False, ensure_ascii=False)


def print_json(value: Any) -> None:
    """Print one JSON document, on one line."""
    sys.stdout.write(to_json(value) + "\n")
