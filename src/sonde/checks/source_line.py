"""Which line of the user's own code is running, in words."""

from __future__ import annotations

import sys

from sonde.source import users_frame


def source_line() -> str:
    """Return `file:line in function` of the innermost frame outside torch and Sonde, or "" if there is none."""
    frame = users_frame(sys._getframe(1))
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
