"""Names of files for things that have names of their own."""

from __future__ import annotations

from typing import Final

_MAX_CHARACTERS: Final = 120


def file_name(name: str) -> str:
    """Return a name that is one file in one folder, whatever the thing is called.

    >>> file_name("../layer 1/weights")
    'layer_1_weights'
    """
    kept = "".join(sign if sign.isalnum() or sign in "-_." else "_" for sign in name)
    return kept.strip("._")[:_MAX_CHARACTERS] or "unnamed"
