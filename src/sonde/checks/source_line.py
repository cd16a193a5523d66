"""Which line of the user's own code is running."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType
from typing import Final

import torch

_NOT_THE_USERS: Final = tuple(f"{Path(file).parent}/" for file in (torch.__file__, Path(__file__).parent))
_MAX_FRAMES: Final = 200
_known: dict[CodeType, bool] = {}
_MAX_KNOWN: Final = 10_000


def source_line() -> str:
    """Return `file:line in function` of the innermost frame outside torch and Sonde, or "" if there is none."""
    frame = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        code = frame.f_code
        if _is_users(code):
            return f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""


def is_users_file(file: str) -> bool:
    """Say whether a source file is neither torch's nor Sonde's nor Python's own, and not made by a compiler."""
    return not file.startswith((*_NOT_THE_USERS, "<frozen", "<eval_with_key>"))


def _is_users(code: CodeType) -> bool:
    known = _known.get(code)
    if known is None:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        known = _known[code] = is_users_file(code.co_filename)
    return known
