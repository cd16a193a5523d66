"""Counts that people give."""

from __future__ import annotations

from typing import Any

from sonde.errors import OptionError


def check_count(what: str, count: Any) -> None:
    """Raise an error unless a count is a whole number of at least 1."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise OptionError(f"{what} takes a whole number of at least 1; got {count!r}.")
